"""One module per command: `add(commands)` declares it, `run(arguments)` does it and returns the exit code.

What a command needs is imported inside `run`, so that `wanma --help` and completion answer at once.
"""
