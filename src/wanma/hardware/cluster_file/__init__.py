"""Descriptions of a cluster: cluster files, one-line shorthand, host lists, and the nodes built from them."""
