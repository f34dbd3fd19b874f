"""Checkpoints: committed as a whole or not at all, verified by hash, loaded into any other layout.

    save.checkpointer.Checkpointer  saves in the background; the step waits only for a copy in host memory
    load.verification.newest        the newest valid checkpoint; damaged ones are skipped with a message
    load.reader.load                fills this rank's tensors from any saved layout
    load.reader.load_full_tensors           full tensors in one process, for sampling and export

The format is tensors as safetensors and everything else as JSON
(docs/reference/checkpoint-format.md); nothing here ever unpickles. `training/` decides what belongs into
a checkpoint and when to save.
"""
