"""Data order: which sample comes next, as a pure function of seed and samples consumed."""
