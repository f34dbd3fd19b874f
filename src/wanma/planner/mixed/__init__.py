"""Empty package; plans for heterogeneous clusters are in `wanma.planner.heterogeneous`."""
