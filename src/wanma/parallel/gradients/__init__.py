"""Gradients of the data-parallel ranks: process groups, bucketed reduction, compression, norm and hooks."""
