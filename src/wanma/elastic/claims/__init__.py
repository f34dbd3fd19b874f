"""Claim stores of nodes that may share no file system."""
