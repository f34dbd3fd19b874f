"""Report of `wanma plan`: the command, its HTML page with charts, and the files it writes."""
