"""Supervision of a run's nodes: start, watch, restart and stop of the ranks, and their coordination.

Entry points: `supervisor.supervisor.run_supervisor` (everything),
`workers.fork_server_handle.ForkServerHandle.start` (the fork server, as early as possible),
`launch_config.LaunchConfig` and `launch_config.RunOutcome` (input and output). One node and many work alike:
a supervisor joins a coordinator, which lives in the same process with one node and behind TCP with several.
Nothing here imports torch except the worker processes themselves; what a rank computes belongs to
`wanma.training`.
"""
