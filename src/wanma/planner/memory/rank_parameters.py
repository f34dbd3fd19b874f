"""Parameters of one pipeline rank, by the layers that hold them and by trained share. Pure data."""

from __future__ import annotations

from typing import NamedTuple


class RankParameters(NamedTuple):
    """Numbers of parameters of one pipeline rank, on one rank of `tp`."""

    dense_blocks: float
    """Parameters of its blocks without routed experts."""
    experts: float
    """Parameters of routed experts, on one rank of `ep`."""
    end_layers: float
    """Parameters of layers that are no blocks: embedding, head."""
    largest_block: float
    """Parameters of its largest block, with this rank's experts."""
    distinct_matrices: float = 0.0
    """Elements of its products' matrices, one of every shape."""
    pre_block: float = 0.0
    """Parameters of layers before the blocks, such as an embedding; backward reaches them last."""
    embedding: float = 0.0
    """Parameters of `pre_block` that are one tensor."""
    largest_block_experts: float = 0.0
    """Parameters of the routed experts of its largest block."""
    tensors: tuple[tuple[float, float], ...] = ()
    """(elements, number) of large tensors that are known one by one; the others may be of any size."""
    trainable_share: float = 1.0
    """Trained share of all parameters, 0 .. 1."""
    table_weight_bytes: float = 0.0
    """Bytes in memory of embedding tables that data ranks share, on the fullest rank; in no other field."""
    table_state_bytes: float = 0.0
    """Bytes of their optimizer state."""
    table_disk_bytes: float = 0.0
    """Bytes of both on disk."""
    trainable_block_share: float = 1.0
    """Trained share of the blocks' parameters."""
    trainable_pre_block_share: float = 1.0
    """Trained share of the parameters before the blocks."""
    trainable_post_block_share: float = 1.0
    """Trained share of the parameters after the blocks."""

    @property
    def trainable_end_layer_share(self) -> float:
        """Return the trained share of the parameters outside the blocks."""
        if not self.end_layers:
            return 1.0
        trained_before = self.pre_block * self.trainable_pre_block_share
        return (trained_before + self.post_block * self.trainable_post_block_share) / self.end_layers

    @property
    def post_block(self) -> float:
        """Return the number of parameters of layers after the blocks, such as a head."""
        return self.end_layers - self.pre_block

    @property
    def total(self) -> float:
        """Return the number of all its parameters."""
        return self.dense_blocks + self.experts + self.end_layers

    @property
    def share_passed_by_backward(self) -> float:
        """Return the share of parameters that backward has passed when it reaches its last block, 0 .. 1."""
        if not self.total:
            return 0.0
        return max(1 - (self.pre_block + self.largest_block) / self.total, 0.0)

    def in_tensors_below(self, elements: float) -> float:
        """Return the number of parameters in tensors of fewer elements, as far as sizes are known."""
        return max(self.total - sum(size * count for size, count in self.tensors if size >= elements), 0.0)
