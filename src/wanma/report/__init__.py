"""From a run directory: what happened, beside what was forecast. Reads files only; never imports torch."""
