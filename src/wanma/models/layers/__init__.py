"""Layers that architectures share: attention, normalization, feed-forward, routed experts, LoRA."""
