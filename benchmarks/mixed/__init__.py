"""Comparison of shares of the batch on two unlike ranks with the ideal."""
