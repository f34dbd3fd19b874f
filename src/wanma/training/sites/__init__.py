"""Synchronization of sites: delayed gradients, local SGD and DiLoCo."""
