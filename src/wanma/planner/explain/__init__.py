"""Why: who holds what, why a plan lost, what to change, what if, how it grows, a step on a clock."""
