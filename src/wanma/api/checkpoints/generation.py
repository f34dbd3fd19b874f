"""Text generation with a trained model: tokens drawn one by one from the model's distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wanma.data.text.tokenizer import Tokenizer
from wanma.job.errors import JobError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class SamplingRule:
    """Sampling rule of the next token."""

    temperature: float = 0.8
    """Divisor of the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens among which to draw; 0: all."""
    top_p: float = 1.0
    """Probability mass among which to draw (nucleus sampling, Holtzman et al. 2020); 0 .. 1.

    The fewest likeliest tokens whose probabilities, after `temperature` and `top_k`, add up to it are kept.
    """
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise JobError(f"temperature = {self.temperature}: must be 0 or more")
        if self.top_k < 0:
            raise JobError(f"top_k = {self.top_k}: must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise JobError(f"top_p = {self.top_p}: must be above 0, at most 1")

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw the next token.

        Args:
            logits: (vocabulary,) fp32 on the CPU.
        """
        import torch

        if self.temperature == 0:
            return int(logits.argmax())
        logits = logits / self.temperature
        if 0 < self.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], -math.inf)
        chances = torch.softmax(logits, dim=-1)
        if self.top_p < 1:
            ordered, order = chances.sort(descending=True, stable=True)
            is_beyond_top_p = ordered.cumsum(0) - ordered >= self.top_p  # the likeliest token always stays
            chances = chances.index_fill(0, order[is_beyond_top_p], 0.0)
        return int(torch.multinomial(chances, 1, generator=generator))


def generate_continuation(
    model: nn.Module, tokenizer: Tokenizer, length: int, prompt: str, tokens: int, sampling: SamplingRule
) -> Iterator[str]:
    """Yield pieces of the text that continues `prompt`, until the model ends its document.

    Args:
        model: function of tokens (1, sequence) to logits (1, sequence, vocabulary), or an object with them.
        length: maximum tokens that the model sees.
        tokens: maximum tokens to generate.
    """
    import torch

    from wanma.training.loss.loss_functions import logits_of

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(sampling.seed)
    context = [int(token) for token in tokenizer.encode(prompt.encode())] or [tokenizer.end_of_document_id]
    written: list[int] = []
    shown = ""
    for _ in range(tokens):
        with torch.inference_mode():
            output = model(torch.tensor([context[-length:]], device=device))
            logits = logits_of(output)[0, -1, : tokenizer.vocabulary_size].float().cpu()
            token = sampling.draw(logits, generator)
        if token == tokenizer.end_of_document_id:
            break
        context.append(token)
        written.append(token)
        text = tokenizer.decode(written)
        # A character may take several tokens: hold incomplete ones back.
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        yield text[len(shown) :]
        shown = text
    if tail := tokenizer.decode(written)[len(shown) :]:
        yield tail
