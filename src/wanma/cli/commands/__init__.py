"""Commands, one module each: `add_parser(commands)` declares it, `run(arguments)` returns its exit code.

Modules that a command needs are imported inside `run`, so that `wanma --help` and completion answer at once.
"""
