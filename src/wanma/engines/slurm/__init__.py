"""Slurm engine: a batch job whose nodes each run one supervisor, found again by the job's number.

Slurm is asked through its commands, whose parsable text is the same in all versions; its JSON is not.
"""
