"""Tools on stored data: inspection and verification."""
