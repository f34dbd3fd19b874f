"""Parameters of a rank: allocation, initial values, replication, freezing, changes by a forward."""
