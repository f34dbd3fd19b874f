"""Context parallelism: a rank's shard of each sequence, ring attention, all-to-all attention."""
