"""Diagnosis of workers: hang detector and hang report, straggler detector."""
