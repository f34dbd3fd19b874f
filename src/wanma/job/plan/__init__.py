"""Execution plan as pure data: mesh-dimension sizes, rows of the batch, placement, synchronization."""
