"""Compressed gradients end to end: runs that carry on, on the same ranks and on others, and that converge."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import equal
from support.ranks import Outcome, run_job
from support.recovering import cut_back, messages
from support.text import DECODER, text_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Compression

LOSSY: tuple[Compression, ...] = ("int8", "topk", "powersgd")
ALL: tuple[Compression, ...] = ("bf16", "fp16", *LOSSY)
LAYOUTS = {
    "replicas": Plan(dp_replicate=2, micro_batch=2),
    "four replicas": Plan(dp_replicate=4, micro_batch=2),
    "shards": Plan(dp_shard=2, shard="parameters", micro_batch=2),
    "hybrid": Plan(dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=2),
    "tensor": Plan(dp_replicate=2, tp=2, micro_batch=3),
    "four replicas by machines": Plan(dp_replicate=4, micro_batch=2, all_reduce="hierarchical"),
}
BY_MACHINES = {rank: {"local_world_sizes": (2, 2)} for rank in range(4)}
"""Nodes of the ranks, as far as plans that sum by nodes know them."""


def run(directory: Path, job: dict[str, Any], plan: Plan, patch: str | None = None) -> Outcome:
    return run_job(
        directory, job, plan, workers=BY_MACHINES if plan.all_reduce == "hierarchical" else None, patch=patch
    )


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Runs of whole gradients, one for each layout."""

    @cache
    def run_of(layout: str) -> Outcome:
        folder = tmp_path_factory.mktemp("exact")
        return run(folder / "run", job(folder), LAYOUTS[layout])

    return run_of


@pytest.fixture(scope="module")
def native_int8(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two steps of two replicas whose gradients travel in 8 bits."""
    folder = tmp_path_factory.mktemp("int8")
    return run(folder / "run", job(folder, steps=2), compressed(LAYOUTS["replicas"], "int8"))


def job(folder: Path, steps: int = 4, **train: Any) -> dict[str, Any]:
    keys = {"steps": steps, "global_batch": 6, "deterministic": True, "schedule": "constant"}
    keys |= {"validation_samples": 4, **train}
    saved = {"every_steps": 2}
    # Of a text that nobody edits here: what a run comes to depends on what it reads.
    return text_job(folder, DECODER, text=difflib.__file__, sequence_length=32, checkpoint=saved, **keys)


def compressed(plan: Plan, kind: Compression, **fields: Any) -> Plan:
    return plan.with_changes(
        **{
            "compression": kind,
            "compression_share": 0.05,
            "compression_rank": 2,
            "approximate": ("compression",),
            **fields,
        }
    )


def remainders(outcome: Outcome, step: int | None = None) -> dict[str, torch.Tensor]:
    """By parameter, what all ranks together have left out of its gradients."""
    start = "compression.error."
    tensors = outcome.tensors(step)
    return {name.removeprefix(start): t.sum(0) for name, t in tensors.items() if name.startswith(start)}


EVERYTHING = {
    "replicas": Plan(dp_replicate=2, micro_batch=2),
    "replicas by machines": Plan(dp_replicate=4, micro_batch=1, all_reduce="hierarchical"),
    "replicas in bf16": Plan(dp_replicate=2, micro_batch=2, precision="bf16"),
    "ZeRO 1": Plan(dp_shard=2, shard="optimizer", micro_batch=2),
    "ZeRO 2": Plan(dp_shard=2, shard="gradients", micro_batch=2),
    "ZeRO 3, of uneven shards": Plan(dp_shard=3, shard="parameters", micro_batch=1),
    "hybrid, tensor": Plan(dp_replicate=2, dp_shard=2, tp=2, shard="gradients", micro_batch=2),
    "pipeline": Plan(pp=2, stage_cuts=(1,), dp_replicate=2, micro_batch=1),
    "pipeline of shards": Plan(pp=2, stage_cuts=(1,), dp_shard=2, shard="optimizer", micro_batch=1),
    "context": Plan(cp=2, micro_batch=3),
    "experts": Plan(dp_shard=4, shard="parameters", ep=2, micro_batch=2),
    "experts cut across": Plan(dp_shard=4, shard="parameters", micro_batch=2),
}


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.daily(
    "replicas by machines", "replicas in bf16", "ZeRO 3, of uneven shards", "pipeline", "context"
)
def test_where_all_elements_are_chosen_the_sums_are_those_of_whole_gradients(
    name: str, tmp_path: Path
) -> None:
    plan, task = EVERYTHING[name], job(tmp_path, steps=3)
    task["checkpoint"]["every_steps"] = 0
    task["train"]["precision"] = plan.precision
    if name.startswith("experts"):
        # Two experts, which four shards cannot have each whole ones of. All see all tokens: a choice between
        # them would make one last place into another loss.
        experts = 4 if plan.ep > 1 else 2
        task["model"] |= {"experts": experts, "experts_per_token": experts}
    whole = run(tmp_path / "whole", task, plan)
    chosen = run(tmp_path / "chosen", task, compressed(plan, "topk", compression_share=1.0))
    assert chosen.losses == pytest.approx(whole.losses, rel=1e-5)
    assert chosen.norms == pytest.approx(whole.norms, rel=1e-4)
    kept = remainders(chosen)
    assert kept
    assert not any(error.any() for error in kept.values())


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("replicas", "int8"),
        ("replicas", "powersgd"),
        ("shards", "int8"),
        ("shards", "topk"),
        ("shards", "powersgd"),
        ("hybrid", "powersgd"),
        ("hybrid", "topk"),
        ("tensor", "powersgd"),
        ("four replicas by machines", "int8"),
        ("four replicas by machines", "powersgd"),
    ],
)
@pytest.mark.daily("replicas-powersgd", "shards-topk", "four replicas by machines-int8")
def test_carrying_on_is_bitwise_the_same_as_never_having_stopped(
    layout: str, kind: Compression, tmp_path: Path
) -> None:
    plan = compressed(LAYOUTS[layout], kind)
    whole = run(tmp_path / "whole", job(tmp_path), plan)
    parts = run(cut_back(whole, 2, tmp_path / "parts"), job(tmp_path), plan)
    assert '"source": "step-00000002"' in messages(parts)
    assert parts.losses == whole.losses
    equal(whole, parts)
    expected = whole.tensors()
    assert any(name.startswith("compression.error.") for name in expected)
    assert any(name.startswith("compression.q.") for name in expected) == (kind == "powersgd")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("four replicas", "shards"),
        ("shards", "four replicas"),
        ("four replicas", "hybrid"),
        ("hybrid", "tensor"),
        ("four replicas by machines", "shards"),
        ("four replicas", "four replicas by machines"),
    ],
)
@pytest.mark.daily("four replicas-shards", "hybrid-tensor")
def test_what_was_left_out_is_still_owed_on_another_layout(first: str, second: str, tmp_path: Path) -> None:
    """The step on the other layout is summed whole, so that what is owed is seen as it was taken over."""
    run(tmp_path / "run", job(tmp_path, steps=2), compressed(LAYOUTS[first], "topk"))
    before = remainders(Outcome(tmp_path / "run"), step=2)
    for name, kept in before.items():
        assert kept.abs().max() > 0, name
    seen = run(
        tmp_path / "run",
        job(tmp_path, steps=3),
        compressed(LAYOUTS[second], "topk", compression_from_step=3),
    )
    after = remainders(seen, step=3)
    assert after.keys() == before.keys()
    for name, kept in before.items():
        torch.testing.assert_close(after[name], kept, rtol=1e-6, atol=1e-7 * float(kept.abs().max()))


def test_other_ways_of_summing_leave_behind_what_they_cannot_keep_and_say_so(tmp_path: Path) -> None:
    plan = LAYOUTS["replicas"]
    run_job(tmp_path / "run", job(tmp_path, steps=2), compressed(plan, "topk"))
    assert not remainders(run_job(tmp_path / "run", job(tmp_path), plan))
    told = messages(Outcome(tmp_path / "run"))
    assert "gradient compression: error feedback of" in told
    assert "is dropped" in told


@pytest.mark.parametrize("layout", ["replicas", "shards", "hybrid"])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.daily("bf16-shards", "fp16-replicas")
def test_sixteen_bits_follow_the_whole_gradients_closely(
    kind: Compression, layout: str, exact: Callable[[str], Outcome], tmp_path: Path
) -> None:
    rounded = run_job(tmp_path / kind, job(tmp_path), compressed(LAYOUTS[layout], kind))
    assert rounded.losses == pytest.approx(exact(layout).losses, rel=2e-3)
    assert rounded.norms != exact(layout).norms, "nothing was rounded"


def test_until_compression_begins_a_run_is_that_of_whole_gradients(
    exact: Callable[[str], Outcome], tmp_path: Path
) -> None:
    plan = compressed(LAYOUTS["shards"], "topk", compression_from_step=3)
    late = run_job(tmp_path / "late", job(tmp_path), plan)
    assert late.norms[:3] == exact("shards").norms[:3]
    assert late.norms[3] != exact("shards").norms[3]
    assert [step["gradient_bytes_sent"] > 0 for step in late.steps] == [False, False, False, True]


def test_parameters_that_a_group_leaves_whole_are_summed_whole(tmp_path: Path) -> None:
    groups = (("*embedding*", "none"), ("layers.0.*", "int8"))
    frozen = [{"match": "layers.1.*", "frozen": True}]
    run = run_job(
        tmp_path / "run",
        job(tmp_path, steps=2, parameter_groups=frozen),
        compressed(LAYOUTS["hybrid"], "topk", compression_groups=groups),
    )
    kept = remainders(run)
    assert not any("embedding" in name or name.startswith("layers.1.") for name in kept)
    assert any(name.startswith("layers.0.") for name in kept)
    assert len({name.partition(".")[0] for name in kept}) > 1, "the rest is topk's"


@pytest.mark.parametrize("layout", ["replicas", "four replicas by machines"])
@pytest.mark.daily("replicas")
def test_sums_in_flight_beside_each_other_are_those_of_one_after_the_other(
    layout: str, tmp_path: Path
) -> None:
    """In many buckets, of some of which a rank of a machine sums nothing, by all methods at once."""
    groups = (("*attention*", "powersgd"), ("*norm*", "none"), ("*down*", "topk"), ("*up*", "bf16"))
    plan = compressed(LAYOUTS[layout], "int8", compression_groups=groups, bucket_bytes=1 << 12)
    in_flight = run(tmp_path / "in flight", job(tmp_path, steps=2), plan)
    one_by_one = run(
        tmp_path / "one by one", job(tmp_path, steps=2), plan, "support.one_by_one:sum_one_by_one"
    )
    expected, got = one_by_one.tensors(), in_flight.tensors()
    assert {name.split(".")[1] for name in got if name.startswith("compression.")} == {"error", "q"}
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_a_pattern_that_matches_nothing_is_a_typing_error(tmp_path: Path) -> None:
    plan = compressed(LAYOUTS["replicas"], "int8", compression_groups=(("embeding.*", "none"),))
    with pytest.raises(AssertionError, match=r"groups\[0\]\.match = 'embeding\.\*'"):
        run_job(tmp_path, job(tmp_path), plan)


def test_a_step_that_is_left_out_leaves_nothing_behind(tmp_path: Path) -> None:
    run = run_job(
        tmp_path,
        job(tmp_path, steps=2, non_finite="skip"),
        compressed(LAYOUTS["replicas"], "powersgd"),
        patch="support.forgetful:gradients_of_step_2_are_not_finite",
    )
    kept = remainders(run)
    assert kept
    for name, error in kept.items():
        assert not error.any(), name
    assert all(tensor.isfinite().all() for tensor in run.tensors().values())


def test_records_tell_what_was_sent_and_what_is_still_owed(native_int8: Outcome) -> None:
    parameters = sum(t.numel() for n, t in native_int8.tensors().items() if n.startswith("model."))
    for step in native_int8.steps:
        whole = step["gradient_bytes_sent"] + step["gradient_bytes_saved"]
        assert whole == pytest.approx(4 * parameters, rel=0.001)  # two ranks send half of it twice
        assert 1.0 < 4 * step["gradient_bytes_sent"] / whole < 1.3
        assert 0 < step["compression_error_norm"] < step["grad_norm"]


def test_between_machines_goes_what_one_rank_of_each_would_send(tmp_path: Path) -> None:
    ended = run(tmp_path, job(tmp_path, steps=2), compressed(LAYOUTS["four replicas by machines"], "int8"))
    parameters = sum(t.numel() for n, t in ended.tensors().items() if n.startswith("model."))
    for step in ended.steps:
        whole = step["gradient_bytes_sent"] + step["gradient_bytes_saved"]
        assert whole == pytest.approx(4 * parameters / 2, rel=0.01)  # each of two ranks a half
        assert 1.0 < 4 * step["gradient_bytes_sent"] / whole < 1.3


def test_without_a_compiler_int8_is_as_exact_and_it_is_told(native_int8: Outcome, tmp_path: Path) -> None:
    plan, text = compressed(LAYOUTS["replicas"], "int8"), job(tmp_path, steps=2)
    plain = run_job(tmp_path / "plain", text, plan, patch="support.compilers:there_is_none")
    told = (
        "int8 compression is several times slower on this node, because its native library is not available: "
        "no C++ compiler was found"
    )
    assert told in messages(plain)
    assert told not in messages(native_int8)
    assert plain.losses == native_int8.losses


# ------------------------------------------------------------ convergence


class Ends:
    """Mean loss of the last five steps, of each run made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, float] = {}

    def __call__(self, kind: Compression, steps: int, share: float = 0.2, forgetful: bool = False) -> float:
        name = f"{kind} {share}{', forgetful' if forgetful else ''}, {steps} steps"
        if name not in self._known:
            text = job(self._folder, steps=steps, global_batch=8, learning_rate=3e-3)
            text["checkpoint"] = {"every_steps": 0}
            plan = Plan(dp_replicate=2, micro_batch=4)
            if kind != "none":
                plan = compressed(plan, kind, compression_share=share, compression_rank=8)
            patch = "support.forgetful:errors_are_forgotten" if forgetful else None
            losses = run_job(self._folder / name, text, plan, patch=patch).losses
            self._known[name] = sum(losses[-5:]) / 5
        return self._known[name]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends(tmp_path_factory.mktemp("convergence"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.daily("powersgd")
def test_a_run_with_compressed_gradients_converges_as_that_of_whole_ones(
    kind: Compression, ends: Ends
) -> None:
    steps = 60 if kind == "topk" else 30  # what topk owes takes longest to be sent
    assert ends(kind, steps) < ends("none", steps) + 0.15


@pytest.mark.slow
@pytest.mark.full
def test_without_its_memory_top_k_falls_behind(ends: Ends) -> None:
    """Lose elements that are never among a tensor's largest: they are never learned."""
    assert ends("topk", 60, share=0.003, forgetful=True) > ends("topk", 60, share=0.003) + 0.05
