"""Format of a checkpoint: manifest and safetensors header, boxes of tensors, and the shards of this rank."""
