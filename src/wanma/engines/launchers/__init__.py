"""Launchers of others, such as mpirun, srun and torchrun: their placement of this process, and its use.

`placement.read_placement` reads the environment, by one reader per launcher; `job_placement` makes it the
default of a job's nodes and ranks; `node_leader` makes one of a node's processes its supervisor.
"""
