"""Report of a machine benchmark: tables, page, parts slower than their kind, roofline."""
