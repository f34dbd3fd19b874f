"""Asynchronous all-reduce: of a gradient bucket, and, optionally quantized, between sites."""
