"""Checks of a node: `wanma doctor`, and the health of one device."""
