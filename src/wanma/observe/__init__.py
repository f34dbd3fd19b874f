"""Observation of a run: one stream of events, the sinks that it flows into, and its measurements.

Rank 0 owns a `Recorder`; the supervisor owns a console. Nothing here imports torch, so that the command line
stays fast; the files written are described in docs/reference/run-directory.md.
"""
