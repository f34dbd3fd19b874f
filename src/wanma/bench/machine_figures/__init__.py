"""Names and definitions of the figures of a machine benchmark."""
