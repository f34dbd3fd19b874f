"""Discovery of this node: devices, usable cores and memory, network, topology, CPU peak."""
