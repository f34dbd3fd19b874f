"""Cost of failures in seconds and steps, beside the peers', and of in-memory checkpoints; simulated runs."""
