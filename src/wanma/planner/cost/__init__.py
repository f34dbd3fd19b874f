"""Step-time cost model: layers, communication, offload and optimizer under a plan, assembled into a step."""
