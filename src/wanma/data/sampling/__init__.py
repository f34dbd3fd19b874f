"""Data order: the next sample as a pure function of seed and samples consumed."""
