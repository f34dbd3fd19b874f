"""Measurements of a rank's step: compute seconds, and counts and bytes of its collectives."""
