"""Command line of wanma: each command parses, calls one function of a lower room, and prints; no logic."""
