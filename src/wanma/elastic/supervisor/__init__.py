"""Supervisor of a node: the workers of a generation, their drain, and the coordinator's commands."""
