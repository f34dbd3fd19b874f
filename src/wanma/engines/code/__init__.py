"""Code snapshots: the user's code as a content-addressed archive, unpacked once on each node of a run.

`snapshot.make_snapshot` packs a folder, `cache.unpack_snapshot` unpacks the archive, and
`provenance.record_provenance` writes the commit and the diff into the run directory. `unpack.py` also runs
alone on a node without wanma. The engines copy archives and start commands.
"""
