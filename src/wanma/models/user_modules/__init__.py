"""User modules: checks, errors, labels, and the transfer to worker processes."""
