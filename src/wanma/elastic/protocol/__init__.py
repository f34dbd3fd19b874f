"""Messages between coordinator, supervisors, fork server and workers: framing, signing, secret."""
