"""Time from the command to the end of the first optimizer step on a Ray cluster, wanma beside Ray Train."""
