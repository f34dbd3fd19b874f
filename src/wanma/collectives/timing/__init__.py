"""Communication time, exposed and total, by parallelism; waits in functional collectives."""
