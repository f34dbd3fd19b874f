"""Results of benchmarks as they are stored: their content and their folders."""
