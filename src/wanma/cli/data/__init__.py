"""Command `wanma data`, a module for each action: stored data inspected, verified and prepared."""
