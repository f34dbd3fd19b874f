"""Workload of a model and forecast of a plan as pure data: FLOPs, bytes, seconds, joules."""
