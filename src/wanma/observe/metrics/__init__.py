"""Readers of GPUs, processes and the node."""
