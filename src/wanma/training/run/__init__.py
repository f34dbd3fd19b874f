"""One rank's run between its steps: the trainer, its records, and its settings and health at the start."""
