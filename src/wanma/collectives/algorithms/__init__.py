"""Collectives composed of point-to-point messages, and the hierarchical all-reduce over nodes."""
