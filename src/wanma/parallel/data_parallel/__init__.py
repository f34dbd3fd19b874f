"""Data parallelism: parameters replicated, or sharded by FSDP2 (ZeRO 0-3)."""
