"""Statistics of measurements: estimates with intervals, warm-up, verdicts, end of a series."""
