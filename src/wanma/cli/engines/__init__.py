"""Commands for runs on engines."""
