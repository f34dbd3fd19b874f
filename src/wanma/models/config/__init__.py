"""Configuration of models: dimensions as data, presets, and resolution of a [model] section (no torch)."""
