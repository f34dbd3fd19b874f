"""Checkpoints in memory: memory files, partner nodes, restore, reshard, flush to disk."""
