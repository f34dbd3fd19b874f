"""Node cache: blocks of remote files on a node's disk, downloaded once for all its processes."""
