"""Turns of programs that live at once: their clocks, their processes, and the guard of those."""
