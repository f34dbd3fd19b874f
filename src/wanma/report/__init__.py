"""Reports of runs: a run directory's record beside its forecast.

Reads files only; never imports torch.
"""
