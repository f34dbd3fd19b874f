"""Benchmark of `wanma bench` itself: its cost, its error rates between commits, and whether it repeats."""
