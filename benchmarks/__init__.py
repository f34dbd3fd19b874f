"""Side-by-side comparisons with other systems; README.md describes how each is run and reported."""
