"""Index of a list of files: rows of each file and positions of all samples, built once and kept in the cache.

`build.py` opens or builds it, `sample_index.py` locates and reads samples by their global number.
"""
