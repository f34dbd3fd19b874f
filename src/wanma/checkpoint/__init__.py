"""Checkpoints: committed whole or not at all, verified by hash, loaded on any other layout.

    writer.Checkpointer     saves in the background; the step waits only for a copy in host memory
    reader.newest           the newest checkpoint that is whole; damaged ones are skipped and told
    reader.load             fills this rank's tensors from whatever layout was saved
    reader.load_full        whole tensors in one process, for sampling and export

The format is tensors as safetensors and everything else as JSON (docs/checkpoints.md); nothing here
ever unpickles. What belongs into a checkpoint and when to save is for the training room to say.
"""
