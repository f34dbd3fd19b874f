"""Checkpoint folders on disk: committed and partial ones, retention, fallback folders."""
