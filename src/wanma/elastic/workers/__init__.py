"""Worker processes of a node: fork server, start, environment, signals, output, progress board."""
