"""How much memory a plan takes, by kind: of its fullest rank or of all, one plan or many at once."""
