"""Preparation of a job: its cluster, its workload and its plan with forecast, before anything starts."""
