"""Commands for runs on engines: a module per command."""
