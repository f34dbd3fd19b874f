"""A run as its processes see it: run directory, generation claims, and the context of one rank."""
