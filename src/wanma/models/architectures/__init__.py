"""Architectures: the decoder and the image classifiers, each with its parallel spec."""
