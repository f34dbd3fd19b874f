"""Rows of stored tables as samples of an own model."""
