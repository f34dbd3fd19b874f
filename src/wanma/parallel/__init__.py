"""Parallel execution of a plan: meshes, parallelism of every kind, memory savers and timers."""
