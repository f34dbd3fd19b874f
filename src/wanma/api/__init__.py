"""Python API of wanma: train, load, plan, session, and the work behind each command."""
