"""Local engine: the run is on this machine, in the foreground of a command or detached from it."""
