"""Parameter servers: processes that hold shards of a model's parameters and apply pushed gradients."""
