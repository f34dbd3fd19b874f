"""Collectives between the processes of one machine, over memory that they share.

Gloo, torch's backend for CPUs, sends what one process has to the next through TCP, on one machine too. Here
all ranks of a group map one file in memory, the arena (`arena`): what one rank writes there the others read.
`SharedGroup` (`group`) is a process group of torch's over it, and `backend` makes it for all that ask torch
for a group. The work is done in C++ (`native`), which is compiled where it runs.
"""
