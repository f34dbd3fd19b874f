"""Detection of hangs and stragglers; what it finds goes on as events."""
