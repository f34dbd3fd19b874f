"""Meter of the machine during a measurement, and the rules by which it disturbs one."""
