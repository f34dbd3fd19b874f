"""The supervisor of one node: starts the ranks of a run, watches them and ends them together.

Front doors: `supervisor.run_node` (everything), `supervisor.Node.start` (the fork server, as early
as possible), `launch.Launch` and `launch.Outcome` (what goes in and what comes out). One node or
many follow the same road: a supervisor joins a coordinator, which lives in the same process when
there is one machine and behind TCP when there are several. Nothing here imports torch except the
worker processes themselves; what a rank computes belongs to the training room.
"""
