"""The commands: each parses, calls one function of a room below and prints. No logic lives here."""
