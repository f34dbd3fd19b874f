"""Collectives beyond torch's own: over shared memory, compressed, hierarchical; and their measurement."""
