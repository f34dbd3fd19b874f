"""Which plans there are, and the best of them: the space, its bounds, and what plans share of their costs."""
