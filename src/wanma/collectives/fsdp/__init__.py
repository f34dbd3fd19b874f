"""FSDP2's all-gather and reduce-scatter on CPUs: by Gloo's messages, and over shared memory."""
