"""Asynchronous all-reduce: of a gradient bucket, and, optionally quantised, between sites."""
