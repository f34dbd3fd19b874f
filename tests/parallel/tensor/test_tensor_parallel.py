"""Law 1 under tensor parallelism, with whole activations and with a part of the sequence on each rank."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.compare import EXACT_TRAIN, one_process, same_numbers, spread_over
from support.ranks import Outcome, run_ranks
from support.text import text_job, text_spec
from wanma.data.batch import Batch
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.model import ModelSection
from wanma.models.structure.parallel_spec import ParallelSpec
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.parallel.parallelize import parallelize
from wanma.parallel.tensor.tensor_parallel import apply_tensor_parallel, local_kv_heads
from wanma.training.loss.cross_entropy import cross_entropy_sum
from wanma.training.loss.loss_functions import CrossEntropy

DECODER: dict[str, Any] = {"family": "decoder", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2}
QWEN_2_5 = {
    "preset": "qwen-2.5-0.5b",  # biases, tied
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 32,
    "vocabulary": 320,
}
QWEN_3 = {**QWEN_2_5, "preset": "qwen-3-8b", "hidden": 32}  # norms of single heads, untied


def job(folder: Path, model: dict[str, Any], data: dict[str, Any], **train: Any) -> dict[str, Any]:
    keys = {**EXACT_TRAIN, "global_batch": 5, "validation_samples": 3, **train}
    return text_job(folder, model, data=data, **keys)


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a job under a plan and compares it with one process, which runs once per job."""
    folder = tmp_path_factory.mktemp("tensor")
    made: dict[str, Outcome] = {}

    def run(
        into: Path,
        plan: Plan,
        model: dict[str, Any] = DECODER,
        data: Any = None,
        objects: Any = None,
        **train: Any,
    ) -> None:
        text = job(folder, model, data or {}, **train)
        key = f"{text} {objects}"
        if key not in made:
            made[key] = one_process(tmp_path_factory.mktemp("one"), text, 5, objects=objects)
        same_numbers(made[key], spread_over(into, text, plan, objects=objects))

    return run


PLANS = [
    Plan(tp=2, micro_batch=5),
    Plan(tp=2, sequence_parallel=True, micro_batch=5),
    Plan(tp=2, sequence_parallel=True, micro_batch=2),
    Plan(tp=2, sequence_parallel=True, micro_batch=2, recompute="full"),
    Plan(tp=4, micro_batch=3),
    Plan(tp=4, sequence_parallel=True, micro_batch=3),
    Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="optimizer", micro_batch=1),
    Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="gradients", micro_batch=1),
    Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="parameters", micro_batch=2),
    Plan(tp=2, sequence_parallel=True, dp_replicate=2, micro_batch=2),
    Plan(tp=2, sequence_parallel=True, pp=2, micro_batch=2),
]


def name(plan: Plan) -> str:
    words = [str(plan)]
    words += ["sequence"] * plan.sequence_parallel + [f"recompute {plan.recompute}"] * (
        plan.recompute != "none"
    )
    return ", ".join([*words, f"micro-batches of {plan.micro_batch}"])


@pytest.mark.parametrize("plan", PLANS, ids=name)
@pytest.mark.daily(
    "2 ranks (tp 2), fp32, cpu, micro-batches of 5",
    "2 ranks (tp 2), fp32, cpu, sequence, micro-batches of 2",
    "4 ranks (tp 4), fp32, cpu, sequence, micro-batches of 3",
    "4 ranks (dp_shard 2 × tp 2), gradients sharded, fp32, cpu, sequence, micro-batches of 1",
    "4 ranks (pp 2 × tp 2), fp32, cpu, sequence, micro-batches of 2",
)
def test_a_decoder_with_grouped_heads_follows_one_process(plan: Plan, compare: Any, tmp_path: Path) -> None:
    compare(tmp_path / "run", plan)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ({**DECODER, "tie_embeddings": True}, Plan(tp=2, micro_batch=3)),
        ({**DECODER, "tie_embeddings": True}, Plan(tp=2, sequence_parallel=True, micro_batch=3)),
        (
            {**DECODER, "tie_embeddings": True},
            Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="parameters", micro_batch=1),
        ),
        (QWEN_2_5, Plan(tp=2, sequence_parallel=True, micro_batch=3)),
        (QWEN_2_5, Plan(tp=4, sequence_parallel=True, micro_batch=3)),
        (QWEN_2_5, Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="parameters", micro_batch=1)),
        (QWEN_3, Plan(tp=2, micro_batch=3)),
        (QWEN_3, Plan(tp=4, sequence_parallel=True, micro_batch=3)),
        (QWEN_3, Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="optimizer", micro_batch=1)),
        # Every rank has one query head, but not every one a key and value head of its own.
        ({**DECODER, "kv_heads": 1}, Plan(tp=4, sequence_parallel=True, micro_batch=3)),
        # Three query heads of a rank look at two key/value heads, one of them at the other's neighbour.
        (
            {**DECODER, "hidden": 24, "heads": 6, "kv_heads": 3, "feed_forward": 32},
            Plan(tp=2, sequence_parallel=True, micro_batch=3),
        ),
        ({**DECODER, "dropout": 0.2}, Plan(tp=2, sequence_parallel=True, micro_batch=3)),
        ({**DECODER, "dropout": 0.2}, Plan(tp=2, sequence_parallel=True, micro_batch=1, recompute="full")),
    ],
    ids=str,
)
@pytest.mark.daily(
    "{'family': 'decoder', 'layers': 2, 'hidden': 16, 'heads': 4, 'kv_heads': 2, 'tie_embeddings': "
    "True}-2 ranks (tp 2), fp32, cpu1",
    "{'preset': 'qwen-2.5-0.5b', 'layers': 2, 'hidden': 16, 'heads': 4, 'kv_heads': 2, "
    "'feed_forward': 32, 'vocabulary': 320}-2 ranks (tp 2), fp32, cpu",
    "{'preset': 'qwen-3-8b', 'layers': 2, 'hidden': 32, 'heads': 4, 'kv_heads': 2, 'feed_forward': "
    "32, 'vocabulary': 320}-4 ranks (tp 4), fp32, cpu",
    "{'family': 'decoder', 'layers': 2, 'hidden': 16, 'heads': 4, 'kv_heads': 1}-4 ranks (tp 4), fp32, cpu",
    "{'family': 'decoder', 'layers': 2, 'hidden': 24, 'heads': 6, 'kv_heads': 3, 'feed_forward': "
    "32}-2 ranks (tp 2), fp32, cpu",
    "{'family': 'decoder', 'layers': 2, 'hidden': 16, 'heads': 4, 'kv_heads': 2, 'dropout': 0.2}-2 "
    "ranks (tp 2), fp32, cpu1",
)
def test_every_kind_of_decoder_follows_one_process(
    model: dict[str, Any], plan: Plan, compare: Any, tmp_path: Path
) -> None:
    compare(tmp_path / "run", plan, model)


@pytest.mark.parametrize("plan", [PLANS[1], PLANS[8]], ids=name)
@pytest.mark.parametrize(
    "train",
    [
        {"parameter_groups": [{"match": "embedding.*", "frozen": True}]},
        {"parameter_groups": [{"match": "*norm*", "frozen": True}, {"match": "*.key.*", "frozen": True}]},
        {"parameter_groups": [{"match": "*.query.*", "frozen": True}], "optimizer": "sgd"},
        {"weight_average": 0.5, "gradient_clip": 0.0},
    ],
    ids=str,
)
@pytest.mark.daily(
    "{'parameter_groups': [{'match': 'embedding.*', 'frozen': True}]}-2 ranks (tp 2), fp32, cpu, "
    "sequence, micro-batches of 5",
    "{'parameter_groups': [{'match': '*norm*', 'frozen': True}, {'match': '*.key.*', 'frozen': "
    "True}]}-4 ranks (dp_shard 2 × tp 2), parameters sharded, fp32, cpu, sequence, micro-batches of 2",
    "{'parameter_groups': [{'match': '*.query.*', 'frozen': True}], 'optimizer': 'sgd'}-2 ranks (tp "
    "2), fp32, cpu, sequence, micro-batches of 5",
    "{'weight_average': 0.5, 'gradient_clip': 0.0}-2 ranks (tp 2), fp32, cpu, sequence, micro-batches of 5",
)
def test_frozen_parameters_and_the_average_follow_one_process(
    train: dict[str, Any], plan: Plan, compare: Any, tmp_path: Path
) -> None:
    compare(tmp_path / "run", plan, **train)


def test_documents_see_only_themselves(compare: Any, tmp_path: Path) -> None:
    plan = Plan(tp=2, sequence_parallel=True, micro_batch=3)
    compare(tmp_path / "run", plan, data={"document_masks": True, "sequence_length": 64})


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own, which sees whole logits."""
    assert logits.shape[-1] == 320
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets) ** 2


def test_a_loss_of_ones_own_sees_whole_logits(compare: Any, tmp_path: Path) -> None:
    compare(tmp_path / "run", Plan(tp=2, sequence_parallel=True, micro_batch=3), objects={"loss": squared})


def test_a_micro_batch_without_rows_takes_part(compare: Any, tmp_path: Path) -> None:
    plan = Plan(tp=2, sequence_parallel=True, dp_replicate=2, micro_batch=1)
    assert [len(rows) for rows in plan.micro_batches(3, 1)] == [1, 0]
    compare(tmp_path / "run", plan, global_batch=3)


def test_bf16_stays_close_to_one_process(tmp_path: Path) -> None:
    text = job(tmp_path, DECODER, {}, precision="bf16", steps=10)
    one = one_process(tmp_path / "one", text, 5)
    other = spread_over(tmp_path / "run", text, Plan(tp=2, sequence_parallel=True, micro_batch=5))
    assert other.losses == pytest.approx(one.losses, rel=2e-3)
    assert other.losses != one.losses


class Largest(TorchDispatchMode):
    """Notes the most elements that an operator's result has."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, Tensor) and not isinstance(result, DTensor):
            self.elements = max(self.elements, result.numel())
        return result


ROWS, LENGTH, VOCABULARY = 6, 16, 320


@dataclass(frozen=True)
class Once:
    """Values that one rank saw in a forward and backward."""

    logits: tuple[int, ...]
    largest: int
    """Elements of the largest tensor."""
    forward: dict[str, int]
    """Collectives by name."""
    backward: dict[str, int]
    end: dict[str, int]


def train_once(worker: WorkerContext, plan: Plan) -> Once:
    """Twice, for the modes that watch see each other."""
    section = ModelSection.model_validate({**DECODER, "vocabulary": VOCABULARY})
    spec = text_spec(section, None, LENGTH)
    with open_mesh(worker, plan, 60, "gloo") as grid:  # torch tells its collectives
        parallel = parallelize(spec, plan, grid, 1)
        parallel.initialize_parameters()
        tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
        batch = Batch(
            inputs=(tokens,), targets=tokens, samples=torch.arange(ROWS), real=torch.ones(ROWS).bool()
        )

        def forward() -> DTensor:
            logits: DTensor = parallel.module(tokens, positions=torch.arange(LENGTH))
            return logits

        with Largest() as largest:
            logits = forward()
            CrossEntropy(classes_last=True)(logits, batch)[0].backward()
        with CommDebugMode() as in_forward:
            again = forward()
        loss, _ = CrossEntropy(classes_last=True)(again, batch)
        with CommDebugMode() as in_backward:
            loss.backward()
        with CommDebugMode() as in_end:
            parallel.finalize_gradients()
        return Once(
            tuple(logits.to_local().shape),
            largest.elements,
            collectives(in_forward),
            collectives(in_backward),
            collectives(in_end),
        )


def collectives(mode: CommDebugMode) -> dict[str, int]:
    return {str(call).rpartition(".")[2]: count for call, count in mode.get_comm_counts().items()}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.daily("True")
def test_no_rank_holds_whole_logits(sequence: bool) -> None:
    for once in run_ranks(train_once, 4, (Plan(tp=4, sequence_parallel=sequence),), is_reused=True):
        assert once.logits == (ROWS, LENGTH, VOCABULARY // 4)
        assert once.largest == ROWS * LENGTH * VOCABULARY // 4


def test_each_pair_of_matrices_costs_one_collective_before_it_and_one_after_it() -> None:
    pairs = 2 * DECODER["layers"]  # attention and feed-forward; one more with the embedding and the head
    for once in run_ranks(train_once, 2, (Plan(tp=2, sequence_parallel=True),), is_reused=True):
        assert once.forward == {"all_gather_into_tensor": pairs + 1, "reduce_scatter_tensor": pairs + 1}
        assert once.backward == once.forward
        assert once.end == {"allreduce_": 1}  # of the norms' gradients, all in one
    for once in run_ranks(train_once, 2, (Plan(tp=2),), is_reused=True):
        assert once.forward == once.backward == {"all_reduce": pairs + 1}
        assert once.end == {}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x))) * factor
        return result


class Small(nn.Module):
    """Biases wherever a linear can have one, an embedding with padding, keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6, padding_idx=9)
        self.norm = nn.LayerNorm(6)
        self.inner = Inner()
        self.head = nn.Linear(6, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        logits: Tensor = self.head(hidden + self.inner(factor=0.5, x=self.norm(hidden)))
        return logits


ROLES: dict[str, Any] = {
    "embedding": "vocabulary",
    "norm": "norm",
    "inner": "gathered",
    "inner.up": "column",
    "inner.down": "row",
    "head": "head",
}


def small_gradients(module: nn.Module) -> dict[str, np.ndarray]:
    tokens = torch.arange(16).view(2, 8) % 12
    cross_entropy_sum(module(tokens), tokens.roll(1, 1)).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {
        name: (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).numpy()
        for name, gradient in gradients.items()
        if gradient is not None
    }


def make_small() -> Small:
    torch.manual_seed(4)
    return Small().double()


def split_small(worker: WorkerContext, sequence: bool, roles: dict[str, Any], length: int) -> Any:
    """Gradients of the split module, or what was said against splitting or running it."""
    plan = Plan(tp=worker.world_size, sequence_parallel=sequence)
    with open_mesh(worker, plan, 60) as grid:
        module = make_small()
        try:
            apply_tensor_parallel(module, ParallelSpec(blocks=None, tensor_parallel_styles=roles), grid)
            if length != 8:
                module(torch.zeros(1, length, dtype=torch.int64))
        except WanmaError as error:
            return str(error)
        return small_gradients(module)


@pytest.mark.parametrize("sequence", [False, True])
def test_biases_and_padding_have_the_gradients_of_one_process(sequence: bool) -> None:
    expected = small_gradients(make_small())
    assert not expected["embedding.weight"][9].any()
    for gradients in run_ranks(split_small, 2, (sequence, ROLES, 8), is_reused=True):
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_allclose(gradients[name], gradient, rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize(
    ("roles", "length", "ranks", "message"),
    [
        ({name: role for name, role in ROLES.items() if name != "norm"}, 8, 2, "how norm handles a part"),
        (ROLES, 7, 2, "7 tokens cannot be split evenly over 2 tensor-parallel ranks"),
        (ROLES, 8, 5, r"tp = 5 does not divide dim 0 of embedding.weight, \(12, 6\)"),
        ({}, 8, 2, "Small has no matrix that can be split"),
    ],
)
def test_what_cannot_be_split_is_refused(
    roles: dict[str, Any], length: int, ranks: int, message: str
) -> None:
    for said in run_ranks(split_small, ranks, (True, roles, length), is_reused=True):
        assert isinstance(said, str)
        assert re.search(message, said)


@given(st.integers(1, 8), st.integers(1, 8))
def test_each_query_head_meets_its_own_key_and_value_head(kv_heads: int, group: int) -> None:
    """By what grouped attention does: head q of those a rank has takes key head q // (q heads / k heads)."""
    heads = kv_heads * group
    for ranks in (ranks for ranks in range(1, heads + 1) if heads % ranks == 0):
        share = heads // ranks
        for rank in range(ranks):
            seen = local_kv_heads(heads, kv_heads, ranks, rank)
            assert share % len(seen) == 0
            for query in range(share):
                assert seen[query // (share // len(seen))] == (rank * share + query) // group


def test_no_rank_computes_a_head_twice_where_grouped_attention_needs_it_once() -> None:
    assert local_kv_heads(14, 2, 7, 3) == [0, 1]
    assert local_kv_heads(8, 2, 4, 2) == [1]
    assert local_kv_heads(6, 3, 2, 0) == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs the C++ compiler g++: torch.compile builds with it on CPU"
)
@pytest.mark.full
def test_compiled_blocks_follow_the_same_curve(tmp_path: Path) -> None:
    model = {**DECODER, "hidden": 32, "dropout": 0.1}
    text = job(tmp_path, model, {}, precision="fp32", global_batch=4)
    plan = Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="parameters", micro_batch=2, compile=True)
    one = one_process(tmp_path / "one", text, 4)
    other = spread_over(tmp_path / "run", text, plan, seconds=280)
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert other.norms == pytest.approx(one.norms, rel=1e-4)
