"""Coordinator of a run: admission of nodes, rendezvous, generations, resize, failover."""
