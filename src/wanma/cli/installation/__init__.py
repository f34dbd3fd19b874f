"""Commands about the installation: copies of its examples, shell completion, versions."""
