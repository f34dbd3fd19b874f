"""Search for the fastest plans of equal devices: search space, bounds, and costs that plans share."""
