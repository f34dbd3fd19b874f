"""Contenders: how each is started, watched and read."""
