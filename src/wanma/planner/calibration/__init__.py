"""Calibration: microbenchmarks of the local devices, curves fitted to them, corrections learned from runs."""
