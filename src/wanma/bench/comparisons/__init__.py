"""Results beside each other: comparison and reproduction."""
