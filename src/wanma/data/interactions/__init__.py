"""Logs of interactions of users with items: reading, splits, negatives, batches."""
