"""Saving by all ranks: host buffer, durable files, and the commit by rank 0."""
