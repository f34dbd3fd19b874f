"""Environments of nodes: a lock file as one archive, and a virtual environment made from it once.

`lock_file.read_lock` checks that a lock file has fixed content, `archive.make_archive` packs it with this
wanma, and `install.py` makes the environment: as a program that the SSH engine runs on a host, or through
`shared_folder.install_here` in a folder that all nodes see.
"""
