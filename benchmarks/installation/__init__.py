"""Time from nothing to the first steps of the quick start: from the wheel, and from a clone."""
