"""Device catalogue: kinds of accelerators and CPUs with peak rates, memory, links, power and sources."""
