"""Measurement of collectives and of the links between nodes."""
