"""Validation of plans: settings that exclude each other, sizes that do not divide, runtime limits."""
