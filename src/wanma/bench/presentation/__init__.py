"""Presentation of benchmark results: terminal tables, and a page that needs no network."""
