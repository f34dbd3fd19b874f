"""Empty package; calibration is in `wanma.planner.calibration`."""
