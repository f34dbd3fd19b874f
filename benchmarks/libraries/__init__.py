"""Comparison of the wheel's compiled libraries and natively compiled ones, on one node."""
