"""Record of one execution of a contender: its steps, and the machine meanwhile."""
