"""Datasets as `transformers` and `datasets` have them: dicts with `labels`."""

from __future__ import annotations

from typing import Any

import torch

from wanma.data.batch import IGNORE_INDEX


class LabelledTokens:
    """Padded sequences with a label for each token, none for padding and for a prompt of some tokens."""

    def __init__(self, size: int = 24, sequence: int = 8, vocabulary: int = 320, left: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(vocabulary, (size, sequence), generator=generator)
        lengths = torch.arange(size).unsqueeze(1) % (sequence - 2) + 3
        places = torch.arange(sequence)
        self.mask = ((places >= sequence - lengths) if left else (places < lengths)).long()
        prompt = (self.mask.cumsum(1) <= 1) & (torch.arange(size).unsqueeze(1) % 2 == 0)
        self.labels = self.tokens.masked_fill((self.mask == 0) | prompt, IGNORE_INDEX)
        if left:  # the first token after padding would be predicted from padding
            self.labels[self.mask.cumsum(1) == 1] = IGNORE_INDEX

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "input_ids": self.tokens[index].tolist(),
            "attention_mask": self.mask[index].tolist(),
            "labels": self.labels[index].tolist(),
        }


def whole(dataset: Any) -> dict[str, torch.Tensor]:
    """All samples as the batch that a model of transformers is called with."""
    items = [dataset[index] for index in range(len(dataset))]
    return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in items[0]}
