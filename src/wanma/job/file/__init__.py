"""Job file: reading of TOML and YAML, overrides, validation with line numbers, schema, and writing."""
