"""Tensor parallelism: matrices split over `tp` by role, modules that compute with local shards."""
