"""Engines: interfaces that place the supervisors of a run on nodes, and report on the run.

`engine.Engine` is the interface, with a package for each engine; `selection` gives one by its name. What
happens on each node belongs to `wanma.elastic`.
"""
