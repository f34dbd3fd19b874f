"""Pipeline stages and schedules: partition of a model, simulation of a schedule, lower bounds of its time."""
