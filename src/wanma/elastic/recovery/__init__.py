"""Recovery after a failure or stop: restart policy, re-plan request, in-memory checkpoints, flush."""
