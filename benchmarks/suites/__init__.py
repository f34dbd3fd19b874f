"""Recorded results of suites, which `wanma bench reproduce` runs again."""
