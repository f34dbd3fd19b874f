"""Checkpoints at a URL: storage through fsspec, upload in the background, download and pruning."""
