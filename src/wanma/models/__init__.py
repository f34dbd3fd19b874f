"""Models: plain modules, their configuration, parallel spec, state-dict adapters and workload."""
