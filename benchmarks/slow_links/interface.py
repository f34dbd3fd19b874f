"""What the two ends of a cable are called, in each of the namespaces that it joins."""

NAME = "cable"
ADDRESSES = ("10.93.0.1", "10.93.0.2")
PORT = 29500
"""Where the two machines meet, on the first of them."""
