"""Blocks of the documents: read, checked without running them, and run as a reader would."""
