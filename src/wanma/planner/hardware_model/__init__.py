"""Hardware model: time of one operator or collective on equal devices, their links and host."""
