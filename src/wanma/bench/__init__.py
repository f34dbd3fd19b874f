"""Benchmarks that a user runs on their own nodes, and their output.

Comparisons with other systems are in the repository's folder `benchmarks/`.
"""
