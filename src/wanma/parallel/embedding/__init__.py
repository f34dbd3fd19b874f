"""Embedding tables that data ranks share: their rows, the exchange of ids and vectors, their gradients."""
