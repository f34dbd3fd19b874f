"""Sections of the job file: one typed, frozen model per table, without behavior."""
