"""Calibration of this node for forecasts, measured on its ranks (`wanma cluster --calibrate`)."""
