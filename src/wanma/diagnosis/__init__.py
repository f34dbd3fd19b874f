"""Diagnosis: what bounds a run, or ended it, with its evidence and the change to make."""
