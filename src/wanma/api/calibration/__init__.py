"""Correction of the calibration by finished runs."""
