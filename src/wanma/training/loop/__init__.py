"""Entry points of training: worker, loop of a whole job, session in a user's loop, dry run."""
