"""Loading into any layout, and the search for the newest valid checkpoint."""
