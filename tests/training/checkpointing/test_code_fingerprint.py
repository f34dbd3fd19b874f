"""Fingerprints of wanma's own modules stay those that checkpoints of earlier releases have recorded."""

from __future__ import annotations

import pytest
from torch import nn

from wanma.data.datasets.fingerprint import hash_texts
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.huggingface.module_replacement import UnfusedQKVAttention
from wanma.models.layers.experts import MixtureOfExperts
from wanma.models.layers.feed_forward import GeluFeedForward
from wanma.models.layers.router import RouterGate, SampleReduction, TopKRouter
from wanma.parallel.context.context_parallel import GatheredDocumentMask
from wanma.parallel.expert.expert_parallel import ShardedSampleReduction, TokenDispatcher
from wanma.training.checkpointing.code_fingerprint import code_fingerprint
from wanma.training.checkpointing.run_identity import identity_of


def test_a_module_with_wanmas_own_layers_has_the_fingerprint_of_earlier_releases() -> None:
    """Hashes computed by a release in which the router, its parts and the feed-forward had other names."""
    config = DecoderConfig(
        1, 8, 2, 2, 16, 32, experts=2, experts_per_token=1, balance="bias", expert_feed_forward=16
    )
    model = nn.Sequential(MixtureOfExperts(config), GeluFeedForward(8, 16))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    recorded = "7defa41d0d88594ea9aa78b185acb1fdb340f152ba461a0fbb1722ab546be9c1"
    assert code_fingerprint(model).split(":")[1] == recorded
    recorded = "c00d346aa0c54f067825ae025e27b02e86dbaf6a8e4f06d05d6e907c79534fe4"
    assert identity_of(model, seeded=True).model.split(":")[1] == recorded


@pytest.mark.parametrize(
    ("kind", "recorded"),
    [
        (GatheredDocumentMask, "GatheredDocuments"),
        (GeluFeedForward, "PlainFeedForward"),
        (RouterGate, "Router"),
        (SampleReduction, "WholeSamples"),
        (ShardedSampleReduction, "SplitSamples"),
        (TokenDispatcher, "Exchange"),
        (TopKRouter, "Routing"),
        (UnfusedQKVAttention, "SplitAttention"),
        (MixtureOfExperts, "MixtureOfExperts"),
    ],
)
def test_a_class_of_wanma_goes_by_the_name_that_checkpoints_record(kind: type, recorded: str) -> None:
    assert code_fingerprint(kind).split(":")[1] == hash_texts(recorded)


def test_a_users_class_goes_by_its_own_name() -> None:
    users = type("RouterGate", (nn.Module,), {"__module__": __name__})
    assert code_fingerprint(users).split(":")[1] == hash_texts("RouterGate")
