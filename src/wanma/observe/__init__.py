"""What a run says about itself: one stream of events, the sinks it flows into, and the readers that feed it.

Rank 0 owns a `Recorder`; the supervisor owns a console. Nothing here imports torch, so that the
command line stays fast; the files written are described in docs/run-directory.md.
"""
