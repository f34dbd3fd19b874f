"""What a failure costs: seconds and steps beside the peers, what snapshots cost, and long runs simulated."""
