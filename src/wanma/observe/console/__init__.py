"""Consoles: live display, plain lines, and the progress of a run folded from its events."""
