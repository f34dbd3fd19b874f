"""Structure of a model: parallel spec, repeated blocks, roles and initial values of its parameters."""
