"""Training over slow links between two machines: wanma's ways to sum gradients beside DDP."""
