"""Event loop, endpoints, connections, and the message channel that survives reconnects."""
