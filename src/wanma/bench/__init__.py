"""The benchmark suite: measurements that a user runs on machines of their own, and what they look like.

The comparisons with other systems, in `benchmarks/` of the repository, are ours to run.
"""
