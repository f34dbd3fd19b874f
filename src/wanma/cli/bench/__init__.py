"""Command `wanma bench`: a module for each action."""
