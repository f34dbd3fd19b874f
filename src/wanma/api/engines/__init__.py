"""Runs on engines: submission of a job, attachment to its console, and control of submitted runs."""
