"""Device memory savers: recompute of activations, offload to host memory or disk."""
