"""One optimizer step: micro-batches, agreement of the ranks on sums, update, anomalies."""
