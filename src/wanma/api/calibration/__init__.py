"""Calibration of this machine and its correction by finished runs."""
