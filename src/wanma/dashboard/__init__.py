"""Live page of runs: read-only, from the records in their directories."""
