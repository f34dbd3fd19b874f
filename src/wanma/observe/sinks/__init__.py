"""Sinks of a run's event stream: JSON Lines files, TensorBoard, and the supervisor's console."""
