"""Construction of a recommender, and example features of one row for its forecast."""

from __future__ import annotations

import torch
from torch import Tensor

from wanma.models.recommender.base import Recommender
from wanma.models.recommender.click_models import DcnV2, Dlrm
from wanma.models.recommender.config import PAIR_KINDS, RecommenderConfig
from wanma.models.recommender.embedding_tables import OFFSETS
from wanma.models.recommender.pair_models import MatrixFactorization, TwoTower

_CLASSES: dict[str, type[Recommender]] = {
    "matrix_factorization": MatrixFactorization,
    "two_tower": TwoTower,
    "dlrm": Dlrm,
    "dcnv2": DcnV2,
}


def build_recommender(config: RecommenderConfig) -> Recommender:
    """Build the model that `config` describes."""
    return _CLASSES[config.kind](config)


def example_features(config: RecommenderConfig) -> dict[str, Tensor]:
    """Return the keyword arguments of the model for one row, with bags of their usual size."""
    if config.kind in PAIR_KINDS:
        return {
            config.user: torch.zeros(1, dtype=torch.int64),
            config.item: torch.zeros(1, 1, dtype=torch.int64),
        }
    features = {"dense": torch.zeros(1, config.dense)} if config.dense else {}
    for name in config.tables:
        # The first tensor must have as many rows as there are samples.
        features[name + OFFSETS] = torch.zeros(1, dtype=torch.int64)
        features[name] = torch.zeros(config.bag_sizes.get(name, 1), dtype=torch.int64)
    return features
