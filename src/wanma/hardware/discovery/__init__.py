"""Discovery of this node: devices, usable cores and memory, network and topology."""
