"""Training of a model under a plan: steps, losses, optimizers, checkpoints, checks and loops."""
