"""Suites: files that list what a benchmark measures, shipped ones and users' own."""
