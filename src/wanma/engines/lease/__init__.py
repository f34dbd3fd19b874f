"""Devices that a run has taken, and when it gives them back: budgets, and idle devices."""
