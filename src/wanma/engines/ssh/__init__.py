"""SSH engine: the supervisors of a run are started on hosts by the user's own OpenSSH client.

Nothing is installed or left running on a host besides the run. The modules `host_...` are programs for the
hosts: they need the standard library alone, and are sent to the hosts' interpreters over standard input. Each
has a function `main(request, reply)`: `request` is the caller's JSON value, `reply` sends one back, and the
rest of standard input is the caller's.
"""
