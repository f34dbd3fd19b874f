"""Training scripts, one per peer, as the peer's own documentation writes them."""
