"""Results of benchmarks as they are stored: their content, their folders and an index of them."""
