"""Measurement of the limits of a machine: cases, executions, rates of devices, links and storage."""
