"""FSDP2: base classes of its communication, of which wanma derives its own."""

from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["AllGather", "ReduceScatter"]
