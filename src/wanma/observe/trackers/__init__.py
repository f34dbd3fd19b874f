"""Trackers: copies of a run's records in MLflow, Weights & Biases and others, written beside the training."""
