"""Pipeline parallelism: stages of a model, their run under a schedule, weight tying between them."""
