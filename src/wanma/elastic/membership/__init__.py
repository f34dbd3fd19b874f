"""A supervisor's link to its coordinator: in-process or TCP, with reconnect and failover."""
