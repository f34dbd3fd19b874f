"""Context parallelism: each rank of `cp` holds a part of every sequence; only attention sees all of it.

`sequence_shards.py` says which part. A ring of ranks passes keys and values around (`ring_attention.py`), or
each rank gathers whole sequences for some of the heads (`all_to_all_attention.py`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.job.errors import JobError
from wanma.models.layers.attention import DotProductAttention
from wanma.models.structure.parallel_spec import ParallelSpec
from wanma.parallel.context.all_to_all_attention import all_to_all_attention
from wanma.parallel.context.ring_attention import ring_attention
from wanma.parallel.mesh.parallel_mesh import ParallelMesh


def apply_context_parallel(
    model: nn.Module, parallel_spec: ParallelSpec, parallel_mesh: ParallelMesh
) -> None:
    """Replace the attention cores and the mask of `model` by ones that span the ranks of `cp`.

    Raises:
        JobError: the model declares no attention, or one that a ring cannot compute.
    """
    plan, group = parallel_mesh.plan, parallel_mesh.dim_mesh("cp").get_group()
    pattern = parallel_spec.attention_cores
    cores = [name for name, _ in model.named_modules() if pattern is not None and fnmatchcase(name, pattern)]
    # A pipeline's first and last stages may have no blocks.
    if pattern is None or (not cores and plan.pp == 1):
        raise JobError(
            f"parallel.cp = {plan.cp}: {type(model).__name__} does not declare its attention, which needs "
            "the parts of the sequence on other ranks",
            "set parallel.cp = 1 and use the ranks as dp_replicate or dp_shard",
        )
    for name in cores:
        core = model.get_submodule(name)
        if plan.cp_method == "all_to_all":
            model.set_submodule(name, AllToAllAttention(core, group))
        elif type(core) is DotProductAttention:
            model.set_submodule(name, RingAttention(group))
        else:
            raise JobError(
                f"parallel.cp_method = 'ring': {name} is a {type(core).__name__}, but ring attention "
                "supports only plain dot-product attention",
                "set parallel.cp_method = 'all_to_all'",
            )
    if parallel_spec.mask_module is not None:
        mask = model.get_submodule(parallel_spec.mask_module)
        full_mask = mask if plan.cp_method == "all_to_all" else None
        model.set_submodule(parallel_spec.mask_module, GatheredDocumentMask(group, full_mask))


class GatheredDocumentMask(nn.Module):
    """Replacement of an `AttentionMask` that gathers the documents of all ranks once per forward.

    Args:
        mask: module that makes a mask from the documents of whole sequences; None: the documents themselves
            are returned.
    """

    def __init__(self, group: dist.ProcessGroup, mask: nn.Module | None) -> None:
        super().__init__()
        self._group = group
        self.mask = mask

    def forward(self, document_ids: Tensor | None) -> Tensor | None:
        """Gather document numbers (rows, local sequence), and return what the attention beside it takes."""
        gathered = None
        if document_ids is not None:
            parts = [torch.empty_like(document_ids) for _ in range(self._group.size())]
            dist.all_gather(parts, document_ids.contiguous(), group=self._group)
            gathered = torch.cat(parts, dim=1)
        if self.mask is None:
            return gathered
        mask: Tensor | None = self.mask(gathered)
        return mask


class RingAttention(nn.Module):
    """`DotProductAttention` of sequences that the ranks share as a ring."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        document_ids: Tensor | None,
        scale: float | None = None,
    ) -> Tensor:
        """Compute `DotProductAttention` for the local part of the sequences.

        Args:
            document_ids: of `GatheredDocumentMask`.
        """
        return ring_attention(query, key, value, document_ids, scale, self._group)


class AllToAllAttention(nn.Module):
    """Attention of whole sequences for a share of the heads.

    Args:
        core: attention module of the model.
        group: ranks that share the sequences.
    """

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self._group = group

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """Compute the attention core for the local part of the sequences.

        Args:
            mask: of `GatheredDocumentMask`.
        """
        return all_to_all_attention(self.core, query, key, value, mask, scale, self._group)
