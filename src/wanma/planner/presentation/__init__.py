"""Presentation of a plan: analysis as data, terminal tables, and JSON."""
