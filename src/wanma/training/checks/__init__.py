"""Checks before and in the first step that a user's model and loss give the same numbers on every layout."""
