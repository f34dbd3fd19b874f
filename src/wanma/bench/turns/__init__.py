"""Turns of programs that live at once: their clocks, their processes, and the order in which they run."""
