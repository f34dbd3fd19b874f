"""Measurements of a step: seconds by phase, memory, GPU utilization and power, MFU."""
