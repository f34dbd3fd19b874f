"""Process group of torch's over memory that the ranks of one node share.

Gloo, torch's backend for CPUs, sends data from process to process through TCP, on one node too. Here all
ranks of a group map one unnamed file in memory, the arena (`arena`): each rank reads what the others write
there. `SharedMemoryProcessGroup` (`process_group`) is a process group of torch's over it, and `backend` makes
it whenever torch is asked for a group. The work is done in C++ (`native`), which is compiled where it runs.
"""
