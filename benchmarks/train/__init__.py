"""Recorded comparison of wanma with its peers on the same model, data and batch."""
