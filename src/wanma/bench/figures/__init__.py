"""Figures that follow from measurements: metrics, estimates, scaling, parts of a step, and their texts."""
