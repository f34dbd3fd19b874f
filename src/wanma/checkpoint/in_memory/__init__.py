"""In-memory checkpoints: memory files, partner nodes, restore, reshard, flush to disk."""
