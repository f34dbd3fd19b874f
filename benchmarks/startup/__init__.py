"""Time from the command to the end of the first optimizer step, wanma beside torchrun."""
