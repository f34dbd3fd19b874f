"""Stored images of a job: the fields of their records, their classes and their transform, without torch."""
