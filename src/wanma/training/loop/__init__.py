"""Entry points of training: worker, loop of a complete job, session in a user's loop, dry run."""
