"""Scripts of the peers, in plain torch without wanma."""
