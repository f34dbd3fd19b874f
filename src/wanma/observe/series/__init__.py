"""Series: the catalogue of metrics, and their present values, read from the records of a run."""
