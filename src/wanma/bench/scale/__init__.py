"""Scaling of a job: measured on what is here, forecast beyond it, with the cause of its limits."""
