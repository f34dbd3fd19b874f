"""Commands: `add_parsers(commands)` of a module declares them, and functions run them and return exit codes.

Modules that a command needs are imported inside these, so that `wanma --help` and completion answer at once.
"""
