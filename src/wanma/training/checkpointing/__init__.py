"""Training state: its checkpoints on disk, in memory and at a URL; resume; identity of a run."""
