"""Supervision of a run's nodes: start, watch, restart and stop of the ranks, and their coordination.

Entry points: `supervisor.supervisor.run_node` (everything), `workers.fork_server_handle.Node.start` (the fork
server, as early as possible), `launch_config.Launch` and `launch_config.Outcome` (input and output). One node
and many work alike: a supervisor joins a coordinator, which lives in the same process with one node and
behind TCP with several. Nothing here imports torch except the worker processes themselves; what a rank
computes belongs to `wanma.training`.
"""
