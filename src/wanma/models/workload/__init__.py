"""Workload of a model: parameters, FLOPs, saved activations and operators per layer, by formula or trace."""
