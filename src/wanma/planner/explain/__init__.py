"""Explanation of plans: rank layout, comparison with the best, plan changes that fit, timeline, scaling."""
