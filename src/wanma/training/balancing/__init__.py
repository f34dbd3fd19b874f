"""Load balancing: rank timing, and shares of the batch that follow the speed of the ranks."""
