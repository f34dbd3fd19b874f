"""Cost of a save for the training step: wanma beside torch.distributed.checkpoint."""
