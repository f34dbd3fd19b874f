"""Profile of some steps of a run."""
