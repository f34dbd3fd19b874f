"""Inspection of checkpoints: inventory, integrity scan, comparison of two, comparison of replicas."""
