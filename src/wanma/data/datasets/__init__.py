"""Datasets addressed by sample index: token files, images, and a user's map-style or iterable dataset."""
