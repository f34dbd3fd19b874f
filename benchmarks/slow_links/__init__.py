"""Training over slow links between two nodes: wanma's ways to sum gradients beside DDP."""
