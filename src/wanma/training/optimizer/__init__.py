"""Optimizer of a run: parameter groups, update rules, schedule, weight average, loss scale."""
