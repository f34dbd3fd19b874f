"""Plans for heterogeneous clusters: placement of replicas on node pools, and their shares of the batch."""
