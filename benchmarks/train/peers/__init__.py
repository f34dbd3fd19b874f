"""One training script per peer, as the peer's own documentation writes it."""
