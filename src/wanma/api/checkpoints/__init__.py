"""Checkpoints of a run for its user: list, verify, compare, convert, export, generate text."""
