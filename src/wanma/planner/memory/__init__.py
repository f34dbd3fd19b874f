"""Memory of a plan by kind: of its largest rank or of every rank, for one plan or many at once."""
