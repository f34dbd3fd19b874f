"""Sinks of a run's event stream: JSON Lines files and TensorBoard."""
