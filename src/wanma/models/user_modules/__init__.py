"""A user's own module: checks, errors, labels, and its way to worker processes."""
