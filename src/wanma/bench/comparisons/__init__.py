"""Results beside each other: comparison, history and reproduction."""
