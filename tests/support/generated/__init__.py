"""Modules, losses and data of users' own, generated as source; each trained by wanma and by a plain loop."""
