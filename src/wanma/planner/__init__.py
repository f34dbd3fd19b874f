"""Planning: plan, forecast and search for the plan of a job on a cluster."""
