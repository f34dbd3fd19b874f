"""Unlike machines: which replicas go on which kinds of devices, and what share of the batch each computes."""
