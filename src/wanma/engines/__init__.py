"""Engines: interfaces that place the supervisors of a run on nodes, and report on the run.

`engine.Engine` is the interface; `local.LocalEngine` runs everything on this node. What happens on each node
belongs to `wanma.elastic`.
"""
