"""Losses and validation metrics as sums with their counts: wanma's own, a library's, and a user's."""
