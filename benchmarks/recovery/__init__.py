"""Cost of a failure beside the peers' in seconds and steps, cost of snapshots, and simulated long runs."""
