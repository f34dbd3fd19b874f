"""Comparison of collectives over shared memory and over Gloo, on one node."""
