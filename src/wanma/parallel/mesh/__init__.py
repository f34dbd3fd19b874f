"""Device mesh of a plan: this rank's coordinates, its process groups and their backend, tensors of sites."""
