"""Benchmark of collectives: bandwidth and time by message size, algorithm and number of ranks."""
