"""Comparison of each mesh dimension of a plan with the plain-torch way of doing the same."""
