"""Results in the formats of other programs: tables, and the log of MLPerf."""
