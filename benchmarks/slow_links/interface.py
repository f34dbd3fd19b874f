"""Names of the two ends of a cable, in each of the namespaces that it joins."""

NAME = "cable"
ADDRESSES = ("10.93.0.1", "10.93.0.2")
PORT = 29500
"""Port of the rendezvous, on the first of the two nodes."""
