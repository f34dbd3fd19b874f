"""Random numbers as pure functions of (seed, sample, layer, position): dropout, a forward's draws."""
