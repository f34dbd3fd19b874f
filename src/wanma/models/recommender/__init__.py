"""Recommenders: scores of users and items from embedding tables."""
