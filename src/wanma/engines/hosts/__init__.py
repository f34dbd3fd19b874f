"""Files of a run on machines that share none with this one: programs there, and records brought home."""
