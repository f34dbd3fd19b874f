"""Planning problem, and the forecast of one plan for it: memory, step time, goodput, energy and price."""
