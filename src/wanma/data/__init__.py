"""Data: text, images or a user's dataset as micro-batches, in an order that never changes.

The position in the data is one integer: `batch(numbers)` is a pure function of global sample indices,
whatever the world size, the workers or the layout. `opening.py` is the entry point: `prepare_job_data`
builds token files once per node and imports no torch, `open_dataset` gives each rank its view.
`step_loader.py` prefetches. The use of a batch by a model is left to `training/`.
"""
