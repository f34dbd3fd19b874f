"""Run of a job: launch, records in the run directory, callbacks, re-planning after a resize."""
