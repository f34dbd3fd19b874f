"""Adapter of causal transformers models: module replacement, probe, parallel spec, weights."""
