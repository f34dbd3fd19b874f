"""Start of a step whose embedding rows lie on disk: they are in memory, and those of the next are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from wanma.data.step_loader import StepBatches
from wanma.parallel.embedding.sharded_embedding import ShardedEmbedding


def begin_step(
    embeddings: Sequence[ShardedEmbedding], step: StepBatches, peek: Callable[[], StepBatches | None]
) -> None:
    """Have the rows of a step in memory, and start to read those of the next; every rank calls it.

    Args:
        embeddings: tables; of those without a cache memory holds all rows.
        step: step that begins.
        peek: function that returns the next step, None after the last.

    Raises:
        WanmaError: memory does not hold the rows of the step.
    """
    caches = [(embedding, embedding.cache) for embedding in embeddings if embedding.cache is not None]
    following = peek() if caches else None
    for embedding, cache in caches:
        if cache.prefetched_step != step.step:  # the first one
            cache.prefetch(step.step, _used_rows(embedding, step))
        cache.begin_step()
        if following is not None:
            cache.prefetch(following.step, _used_rows(embedding, following))


def _used_rows(embedding: ShardedEmbedding, step: StepBatches) -> Tensor:
    return embedding.used_rows([batch.keywords for batch in step.micro_batches])
