"""Side-by-side comparisons with peers; README.md says how each is run and stated."""
