"""Hand-over of batches between ranks: one rank reads samples for others that need the same."""
