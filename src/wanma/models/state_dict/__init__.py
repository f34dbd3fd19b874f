"""State-dict adapters: slices of published checkpoints' tensors that make up a model's parameters."""
