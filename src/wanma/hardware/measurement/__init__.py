"""Measurements of this node: run times, rates of its CPU, foreign load, storage."""
