"""Compressed sums over real processes, against references that say what was published in a few lines each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.ranks import run_ranks
from wanma.collectives.balanced_owners import assign_balanced_owners
from wanma.collectives.compression import bucket_tensors as pieces_module
from wanma.collectives.compression.bucket_tensors import BucketTensor, ErrorFeedback
from wanma.collectives.compression.compression_traits import ERROR_FEEDBACK_METHODS
from wanma.collectives.compression.compressor_table import make_compressor
from wanma.collectives.compression.half_precision_codecs import BFloat16Codec, BlockScaledFloat16Codec
from wanma.collectives.compression.hierarchical import HierarchicalCompressor, NodeGroups, split_among_ranks
from wanma.collectives.compression.int8_codec import NATIVE_SOURCE, BlockwiseInt8Codec
from wanma.collectives.compression.overlap import run_interleaved
from wanma.collectives.compression.power_sgd import draw_initial_q
from wanma.hardware.native.native_library import find_or_build_library
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.parallel import Compression
from wanma.parallel.mesh.parallel_mesh import open_mesh

RANKS = 3
STEPS = 4
SHAPES = ((24, 40), (7,), (6, 130))
"""Shapes of gradients; rows that 3 ranks can share, but for the vector."""
SHARE, RANK = 0.1, 2
METHODS: tuple[Compression, ...] = get_args(Compression)
ROUNDING = {"none": 0.0, "bf16": 2**-8, "fp16": 2**-11}
"""Half of the last place, relative; twice, on the way there and back."""

Reference = Callable[[list[Tensor]], Tensor]
"""From what each rank has, a (length,) tensor each, to the sum; what it left out is what is left in them."""


def gradient(step: int, rank: int, which: int) -> Tensor:
    """(rows × columns,), of sizes that differ widely, as those of layers do."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + which)
    shape = SHAPES[which]
    return (torch.randn(shape, generator=generator) * 10.0 ** (1 - 3 * which)).view(-1)


def columns(which: int) -> int:
    return SHAPES[which][1] if len(SHAPES[which]) > 1 else 1


def memory_of(kind: Compression, which: int, destinations: int) -> ErrorFeedback | None:
    if kind not in ERROR_FEEDBACK_METHODS:
        return None
    length = SHAPES[which][0] * columns(which) // destinations
    q = draw_initial_q(f"tensor {which}", columns(which), RANK, seed=1) if kind == "powersgd" else None
    return ErrorFeedback(torch.zeros(destinations, length), q)


def tensors_of(kind: Compression, scattered: bool) -> list[int]:
    """Return the indices of `SHAPES` to try: no vectors for PowerSGD, and shards of equal size."""
    return [0, 2] if kind == "powersgd" or scattered else [0, 1, 2]


def slices_of(elements: int) -> Any:
    """Context in which a slice of a bucket has at most `elements`."""
    return patch.object(pieces_module, "MAX_SLICE_ELEMENTS", elements)


def exchange(worker: WorkerContext, kind: Compression, scattered: bool, elements: int) -> dict[str, Any]:
    """`STEPS` exchanges of one rank: sums by step and tensor, and the errors at the end."""
    with slices_of(elements), open_mesh(worker, Plan(dp_replicate=RANKS), 60) as grid:
        group = grid.dim_mesh("dp_replicate").get_group()
        # Ranks with a compiler and ranks without one understand each other.
        native = find_or_build_library(NATIVE_SOURCE).path if worker.rank % 2 == 0 else None
        method, which = make_compressor(kind, SHARE, native), tensors_of(kind, scattered)
        destinations = RANKS if scattered else 1
        memories = [memory_of(kind, one, destinations) for one in which]
        sums, sent = [], 0
        for step in range(STEPS):
            pieces = []
            for one, memory in zip(which, memories, strict=True):
                values = gradient(step, worker.rank, one).view(destinations, -1)
                result = torch.full((values.shape[1],), torch.nan) if scattered else None
                pieces.append(BucketTensor(values, result, columns(one), memory))
            sent += sum(
                run_interleaved((method.reduce_scatter if scattered else method.all_reduce)(pieces, group))
            )
            totals = [piece.values[0] if piece.shard_sum is None else piece.shard_sum for piece in pieces]
            sums.append([total.tolist() for total in totals])  # tensors do not outlive their process
        kept = [one.residual for one in memories if one is not None and one.residual is not None]
        errors = [error.view(-1).tolist() for error in kept]
        return {"sums": sums, "errors": errors, "sent": sent}


@cache
def ran(
    kind: Compression, scattered: bool, elements: int = pieces_module.MAX_SLICE_ELEMENTS
) -> list[dict[str, Any]]:
    outcome = run_ranks(exchange, RANKS, (kind, scattered, elements), is_reused=True)
    return [
        {
            "sums": [[torch.tensor(one) for one in of_step] for of_step in of_rank["sums"]],
            "errors": [torch.tensor(error) for error in of_rank["errors"]],
            "sent": of_rank["sent"],
        }
        for of_rank in outcome
    ]


def whole_sums(outcome: list[dict[str, Any]], step: int, index: int, scattered: bool) -> Tensor:
    """As all ranks have it together."""
    parts = [of_rank["sums"][step][index] for of_rank in outcome]
    return torch.cat(parts) if scattered else parts[0]


# ------------------------------------------------------------ references


def rounded(values: Tensor) -> Tensor:
    """To 8 bits, in blocks of 256, the last of which may be shorter (Dettmers et al. 2022, even steps)."""
    if not len(values):
        return values
    scale = torch.cat([part.abs().max().expand(len(part)) for part in values.split(256)]) / 127
    return torch.where(scale > 0, (values / scale).round() * scale, 0.0)


def by_int8(corrected: list[Tensor]) -> Tensor:
    """Tang et al. 2019, algorithm 1: workers and the server of each part keep what they lost."""
    total = torch.empty_like(corrected[0])
    row = -(-len(total) // (256 * RANKS)) * 256
    for server in range(RANKS):
        part = slice(server * row, (server + 1) * row)
        given = [c[part] if rank == server else rounded(c[part]) for rank, c in enumerate(corrected)]
        summed = torch.stack(given).sum(0)
        for rank, c in enumerate(corrected):
            if rank != server:
                c[part] -= given[rank]
        total[part] = rounded(summed)
        corrected[server][part] = summed - total[part]
    return total


def by_top_k(corrected: list[Tensor]) -> Tensor:
    """Stich et al. 2018, algorithm 1."""
    total = torch.zeros_like(corrected[0])
    for c in corrected:
        chosen = c.abs().argsort(descending=True)[: -(-len(c) // 10)]  # the share of a tenth
        total[chosen] += c[chosen]
        c[chosen] = 0.0
    return total


def gram_schmidt(matrix: Tensor) -> Tensor:
    basis: list[Tensor] = []
    for column in matrix.double().T:
        for other in basis:
            column = column - (column @ other) * other
        basis.append(column / column.norm())
    return torch.stack(basis, 1).float()


class ByPowerSGD:
    """Vogels et al. 2019, algorithms 1 and 2."""

    def __init__(self, which: int) -> None:
        self.columns = columns(which)
        self.q = draw_initial_q(f"tensor {which}", self.columns, RANK, seed=1)

    def __call__(self, corrected: list[Tensor]) -> Tensor:
        matrices = [c.view(-1, self.columns) for c in corrected]
        basis = gram_schmidt(sum(matrix @ self.q for matrix in matrices))  # type: ignore[arg-type]
        local = [matrix.T @ basis for matrix in matrices]
        self.q = sum(local)  # type: ignore[assignment]
        for matrix, q in zip(matrices, local, strict=True):
            matrix -= basis @ q.T
        return (basis @ self.q.T).reshape(-1)


def expected(kind: Compression, which: int) -> tuple[list[Tensor], list[Tensor]]:
    """Sums of each step, and each rank's error after the last: error feedback as published."""
    reduce: dict[str, Reference] = {"int8": by_int8, "topk": by_top_k, "powersgd": ByPowerSGD(which)}
    errors = [torch.zeros_like(gradient(0, rank, which)) for rank in range(RANKS)]
    sums = []
    for step in range(STEPS):
        errors = [error + gradient(step, rank, which) for rank, error in enumerate(errors)]
        sums.append(reduce[kind](errors))
    return sums, errors


# ------------------------------------------------------------ over processes


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_sums_and_errors_are_those_that_were_published(kind: Compression) -> None:
    outcome = ran(kind, scattered=False)
    for index, which in enumerate(tensors_of(kind, scattered=False)):
        sums, errors = expected(kind, which)
        scale = sums[0].abs().max()
        for step, total in enumerate(sums):
            got = whole_sums(outcome, step, index, scattered=False)
            torch.testing.assert_close(got, total, rtol=1e-4, atol=1e-5 * float(scale))
        for of_rank, error in zip(outcome, errors, strict=True):
            torch.testing.assert_close(of_rank["errors"][index], error, rtol=1e-4, atol=1e-5 * float(scale))


def test_eight_bits_with_both_errors_are_those_that_were_published() -> None:
    """Each tensor alone in a bucket: the parts that a rank sums depend on its neighbours there."""
    (first, *_), errors = expected("int8", 0)
    largest = float(first.abs().max())
    outcome = run_ranks(one_tensor, RANKS, (), is_reused=True)
    for got, total in zip(outcome[0][0], expected("int8", 0)[0], strict=True):
        torch.testing.assert_close(torch.tensor(got), total, rtol=1e-5, atol=1e-5 * largest)
    for (_, kept), error in zip(outcome, errors, strict=True):
        torch.testing.assert_close(torch.tensor(kept), error, rtol=1e-4, atol=1e-5 * largest)


def one_tensor(worker: WorkerContext) -> tuple[list[list[float]], list[float]]:
    with open_mesh(worker, Plan(dp_replicate=RANKS), 60) as grid:
        group = grid.dim_mesh("dp_replicate").get_group()
        method, memory = make_compressor("int8", SHARE), memory_of("int8", 0, 1)
        sums = []
        for step in range(STEPS):
            values = gradient(step, worker.rank, 0).view(1, -1)
            run_interleaved(method.all_reduce([BucketTensor(values, None, columns(0), memory)], group))
            sums.append(values[0].tolist())
        return sums, memory.residual[0].tolist()


@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
@pytest.mark.parametrize("kind", METHODS)
def test_what_is_not_sent_now_is_owed_and_nothing_is_lost(kind: Compression, scattered: bool) -> None:
    outcome = ran(kind, scattered)
    for index, which in enumerate(tensors_of(kind, scattered)):
        given = sum(gradient(step, rank, which) for step in range(STEPS) for rank in range(RANKS))
        assert isinstance(given, Tensor)
        got = sum(whole_sums(outcome, step, index, scattered) for step in range(STEPS))
        largest = float(given.abs().max())
        if kind in ERROR_FEEDBACK_METHODS:
            owed = sum(of_rank["errors"][index] for of_rank in outcome)
            assert float(owed.abs().max()) > 1e-4 * largest, "the method left nothing out"
            torch.testing.assert_close(got + owed, given, rtol=1e-5, atol=1e-5 * largest)
        else:
            most = (
                2.5
                * ROUNDING[kind]
                * sum(
                    float(gradient(step, rank, which).abs().max())
                    for step in range(STEPS)
                    for rank in range(RANKS)
                )
            )
            torch.testing.assert_close(got, given, rtol=0.0, atol=most + 1e-5 * largest)


@pytest.mark.parametrize("kind", METHODS)
def test_all_ranks_get_the_same_bits(kind: Compression) -> None:
    first, *others = ran(kind, scattered=False)
    for other in others:
        for step in range(STEPS):
            for mine, theirs in zip(first["sums"][step], other["sums"][step], strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
def test_buckets_that_are_cut_to_be_made_smaller_lose_nothing_either(scattered: bool) -> None:
    outcome = ran("int8", scattered, elements=512)
    for index, which in enumerate(tensors_of("int8", scattered)):
        given = sum(gradient(step, rank, which) for step in range(STEPS) for rank in range(RANKS))
        assert isinstance(given, Tensor)
        got = sum(whole_sums(outcome, step, index, scattered) for step in range(STEPS))
        owed = sum(of_rank["errors"][index] for of_rank in outcome)
        torch.testing.assert_close(got + owed, given, rtol=1e-5, atol=1e-5 * float(given.abs().max()))


# ------------------------------------------------------------ by machines first


@pytest.mark.parametrize("kind", METHODS)
def test_sums_by_machines_owe_what_they_leave_out_and_are_the_same_bits_everywhere(kind: Compression) -> None:
    check_by_machines(ran_by_machines(kind), kind)


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.full) for kind in ("none", "bf16")), "int8", "topk"],
)
def test_sums_by_machines_in_many_parts_stay_in_order_where_a_rank_has_none_of_one(kind: Compression) -> None:
    """The last part of 512 is of 12 elements, which the first rank of a machine has alone."""
    check_by_machines(run_ranks(by_machines, 4, (kind, 512), is_reused=True), kind)


@cache
def ran_by_machines(kind: Compression) -> list[dict[str, Any]]:
    return run_ranks(by_machines, 4, (kind,), is_reused=True)


def check_by_machines(outcome: list[dict[str, Any]], kind: Compression) -> None:
    for index, which in enumerate(tensors_of(kind, scattered=False)):
        given = sum(gradient(step, rank, which) for step in range(STEPS) for rank in range(4))
        assert isinstance(given, Tensor)
        first, *others = (torch.tensor([of[index] for of in rank["sums"]]) for rank in outcome)
        for other in others:
            assert torch.equal(first, other)
        got, largest = first.sum(0), float(given.abs().max())
        if kind in ERROR_FEEDBACK_METHODS:
            owed = torch.tensor([rank["errors"][index] for rank in outcome]).sum(0)
            assert float(owed.abs().max()) > 1e-4 * largest, "the method left nothing out"
            torch.testing.assert_close(got + owed, given, rtol=1e-5, atol=1e-5 * largest)
        else:
            most = 20 * ROUNDING[kind] * largest
            torch.testing.assert_close(got, given, rtol=0.0, atol=most + 1e-5 * largest)


def test_powersgd_by_machines_is_powersgd_of_machines() -> None:
    """Each matrix has one owner on a machine: only what is owed is added in another order."""
    for rank in ran_by_machines("powersgd"):
        for one, other in (("sums", "of machines"), ("q", "q of machines")):
            close = partial(torch.testing.assert_close, rtol=1e-4)
            for mine, theirs in zip(flat(rank[one]), flat(rank[other]), strict=True):
                close(mine, theirs, atol=1e-4 * float(theirs.abs().max()))


def flat(nested: Any) -> list[Tensor]:
    """The innermost lists."""
    if not isinstance(nested[0], list):
        return [torch.tensor(nested)]
    return [found for one in nested for found in flat(one)]


def by_machines(
    worker: WorkerContext, kind: Compression, elements: int = pieces_module.MAX_SLICE_ELEMENTS
) -> dict[str, Any]:
    """`STEPS` exchanges of one of four ranks on two machines; and of the machines, as if each were a rank."""
    with slices_of(elements), open_mesh(worker, Plan(dp_replicate=4), 60):
        pairs = {(0, 1): dist.new_group([0, 1]), (2, 3): dist.new_group([2, 3])}
        across = {(0, 2): dist.new_group([0, 2]), (1, 3): dist.new_group([1, 3])}
        mine = [next(g for ranks, g in of.items() if worker.rank in ranks) for of in (pairs, across)]
        plain, which = make_compressor(kind, SHARE), tensors_of(kind, scattered=False)
        method = HierarchicalCompressor(plain, NodeGroups(*mine), splits_tensors=kind != "powersgd")
        memories, of_machines = ([memory_of(kind, one, 1) for one in which] for _ in range(2))
        found: dict[str, Any] = {"sums": [], "of machines": []}
        for step in range(STEPS):
            values = [gradient(step, worker.rank, one).view(1, -1) for one in which]
            sums = [one.clone() for one in values]
            for one in sums:
                dist.all_reduce(one, group=mine[0])
            for name, sum_up, given, kept in (
                ("sums", method.all_reduce, values, memories),
                ("of machines", partial(plain.all_reduce, group=mine[1]), sums, of_machines),
            ):
                pieces = [
                    BucketTensor(one, None, columns(number), memory)
                    for one, number, memory in zip(given, which, kept, strict=True)
                ]
                run_interleaved(sum_up(pieces))
                found[name].append([one[0].tolist() for one in given])
        found["errors"] = [
            m.residual[0].tolist() for m in memories if m is not None and m.residual is not None
        ]
        for name, kept in (("q", memories), ("q of machines", of_machines)):
            found[name] = [
                m.power_sgd_q.tolist() for m in kept if m is not None and m.power_sgd_q is not None
            ]
        return found


def test_each_element_of_a_bucket_has_one_owner() -> None:
    pieces = [BucketTensor(torch.zeros(1, length)) for length in (1000, 3, 700, 256)]
    for ranks in (1, 2, 3, 8):
        (run,) = pieces_module.slice_bucket(pieces, 1)
        parts = split_among_ranks(run, ranks)
        places: set[tuple[int, int]] = set()
        for part in parts:
            assert 0 <= part.owner < ranks
            own = {(part.owner, part.offset + at) for at in range(part.stop - part.start)}
            assert not own & places
            places |= own
        for piece in pieces:
            of_it = sorted((part.start, part.stop) for part in parts if part.tensor is piece)
            assert [start for start, _ in of_it] == [0, *(stop for _, stop in of_it[:-1])]
            assert of_it[-1][1] == piece.length
    assert assign_balanced_owners([3, 1000, 700, 256], 2) == [1, 0, 1, 1]
    assert assign_balanced_owners([5, 5, 5], 1) == [0, 0, 0]


@pytest.mark.parametrize("kind", ["int8", "topk", "powersgd"])
def test_a_machine_by_itself_leaves_nothing_out(kind: Compression) -> None:
    for rank in run_ranks(by_itself, 2, (kind,), is_reused=True):
        assert rank["sums"] == pytest.approx(rank["whole"], rel=1e-6)
        assert not any(rank["errors"])
        assert rank["sent"] == 0


def by_itself(worker: WorkerContext, kind: Compression) -> dict[str, Any]:
    with open_mesh(worker, Plan(dp_replicate=2), 60) as grid:
        group = grid.dim_mesh("dp_replicate").get_group()
        alone = [dist.new_group([rank]) for rank in range(2)][worker.rank]
        method = HierarchicalCompressor(
            make_compressor(kind, SHARE), NodeGroups(group, alone), splits_tensors=kind != "powersgd"
        )
        memory, values = memory_of(kind, 0, 1), gradient(0, worker.rank, 0).view(1, -1)
        whole = values.clone()
        dist.all_reduce(whole, group=group)
        (sent,) = run_interleaved(method.all_reduce([BucketTensor(values, None, columns(0), memory)]))
        return {
            "sums": values[0].tolist(),
            "whole": whole[0].tolist(),
            "errors": memory.residual[0].tolist(),
            "sent": sent,
        }


def test_what_travels_is_as_small_as_it_says() -> None:
    sent = {kind: ran(kind, scattered=False)[0]["sent"] / STEPS for kind in METHODS}
    elements = {kind: sum(gradient(0, 0, one).numel() for one in tensors_of(kind, False)) for kind in METHODS}
    assert sent["none"] == 2 * (RANKS - 1) * 4 * elements["none"] // RANKS
    # Each tensor lies on a multiple of 256, and so does each rank's part: 3 × 768 for all.
    assert sent["bf16"] == 2 * (RANKS - 1) * 768 * 2
    assert sent["fp16"] == 2 * (RANKS - 1) * (768 * 2 + 3 * 4)
    assert sent["int8"] == 2 * (RANKS - 1) * (768 + 3 * 4)
    assert sent["topk"] == (RANKS - 1) * 8 * (96 + 1 + 78)
    thin = RANK * (24 + 6), RANK * (40 + 130)
    assert sent["powersgd"] == sum(2 * (RANKS - 1) * 4 * one // RANKS for one in thin)


@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
@pytest.mark.parametrize("kind", METHODS)
def test_each_sum_waits_as_often_as_its_method_says(kind: Compression, scattered: bool) -> None:
    for found in run_ranks(waits, 2, (kind, scattered), is_reused=True):
        # An all-reduce in two phases is a reduce-scatter and what gives the sum to all.
        fewer = kind in ("bf16", "fp16", "int8") and scattered
        assert found == [make_compressor(kind, SHARE).collectives_per_sum - fewer] * len(found)
        assert found


def waits(worker: WorkerContext, kind: Compression, scattered: bool) -> list[int]:
    """Count the waits of each sum that a method makes of the tensors."""
    with open_mesh(worker, Plan(dp_replicate=2), 60) as grid:
        group, destinations = grid.dim_mesh("dp_replicate").get_group(), 2 if scattered else 1
        pieces = [
            BucketTensor(
                gradient(0, worker.rank, one).view(destinations, -1),
                torch.empty(SHAPES[one][0] * columns(one) // 2) if scattered else None,
                columns(one),
                memory_of(kind, one, destinations),
            )
            for one in tensors_of(kind, scattered)
        ]
        method, found = make_compressor(kind, SHARE), []
        for steps in (method.reduce_scatter if scattered else method.all_reduce)(pieces, group):
            found.append(0)
            for work in steps:
                found[-1] += 1
                work.wait()
        return found


def test_what_8_bits_travel_in_is_8_bits_wide() -> None:
    for sent in run_ranks(messages, 2, (), is_reused=True):
        # Two blocks of 256 for each rank, with two scales of 4 bytes; then the sums of this rank's two.
        assert sent == [(torch.uint8, 2 * 520), (torch.uint8, 520)]


def messages(worker: WorkerContext) -> list[tuple[torch.dtype, int]]:
    """(dtype, elements) that a rank hands over, all-to-all and then all-gather, of 1,024 elements."""
    found = []
    exchange, all_gather = dist.all_to_all_single, pieces_module.all_gather_single

    def exchanging(output: Tensor, given: Tensor, **more: Any) -> Any:
        found.append((given.dtype, given.numel()))
        return exchange(output, given, **more)

    def gathering(output: Tensor, given: Tensor, **more: Any) -> Any:
        found.append((given.dtype, given.numel()))
        return all_gather(output, given, **more)

    with open_mesh(worker, Plan(dp_replicate=2), 60) as grid:
        dist.all_to_all_single, pieces_module.all_gather_single = exchanging, gathering
        piece = BucketTensor(torch.randn(1, 1024), None, 1, ErrorFeedback(torch.zeros(1, 1024)))
        run_interleaved(
            make_compressor("int8", SHARE).all_reduce([piece], grid.dim_mesh("dp_replicate").get_group())
        )
        dist.all_to_all_single, pieces_module.all_gather_single = exchange, all_gather
    return found


# ------------------------------------------------------------ codecs


@pytest.mark.parametrize("exponent", [-44, -20, 0, 20, 38])
def test_fp16_with_its_scale_neither_overflows_nor_loses_small_gradients(exponent: int) -> None:
    values = torch.linspace(-1, 1, 512)[None] * 10.0**exponent
    back = BlockScaledFloat16Codec().decode(BlockScaledFloat16Codec().encode(values))
    # Below 2^-126 fp32 itself has fewer places.
    torch.testing.assert_close(back, values, rtol=2**-11, atol=float(values.abs().max()) * 2**-24 + 1e-44)


def test_blocks_of_other_sizes_do_not_cost_fp16_its_precision() -> None:
    values = torch.cat([torch.full((1, 256), 3e30), torch.full((1, 256), 3e-30)], 1)
    torch.testing.assert_close(
        BlockScaledFloat16Codec().decode(BlockScaledFloat16Codec().encode(values)),
        values,
        rtol=2**-11,
        atol=0.0,
    )


def test_an_outlier_costs_its_own_block_its_precision_and_no_other() -> None:
    values = torch.linspace(-1, 1, 512)[None].clone()
    values[0, 0] = 1e6
    back = BlockwiseInt8Codec().decode(BlockwiseInt8Codec().encode(values))
    assert float((back - values)[0, 1:256].abs().max()) == pytest.approx(1.0, rel=0.01)
    assert float((back - values)[0, 256:].abs().max()) <= 1 / 127 / 2 * 1.001


@pytest.mark.parametrize("codec", [BFloat16Codec(), BlockScaledFloat16Codec(), BlockwiseInt8Codec()])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_seen_behind_the_codec(codec: Any, bad: float) -> None:
    values = torch.ones(2, 512)
    values[1, 300] = bad
    back = codec.decode(codec.encode(values))
    assert not back[1, 300].isfinite()
    assert back[0].isfinite().all()
    assert back[1, :256].isfinite().all()


@pytest.mark.parametrize("codec", [BFloat16Codec(), BlockScaledFloat16Codec(), BlockwiseInt8Codec()])
def test_zeros_stay_zeros(codec: Any) -> None:
    assert torch.equal(codec.decode(codec.encode(torch.zeros(1, 256))), torch.zeros(1, 256))


@pytest.fixture(scope="module")
def native() -> BlockwiseInt8Codec:
    found = find_or_build_library(NATIVE_SOURCE)
    if found.path is None:
        pytest.skip(f"needs the C++ compiler g++: {found.failure_reason}")
    return BlockwiseInt8Codec(found.path)


@pytest.mark.parametrize("exponent", [-44, -38, -20, 0, 20, 37])
@pytest.mark.parametrize("threads", [1, 3])
def test_int8_in_native_code_makes_the_bytes_that_torchs_operators_make(
    native: BlockwiseInt8Codec, exponent: int, threads: int
) -> None:
    """Also of blocks of zeros, of one number alone, and of numbers so small that fp32 has fewer places."""
    values = torch.randn(3, 1500 * 256, generator=torch.Generator().manual_seed(exponent)) * 10.0**exponent
    values[1, 256:512] = 0.0
    values[2, 512:768] = 0.0
    values[2, 700] = -values[2, 0].abs()
    lost, native_lost, plain = values.clone(), values.clone(), BlockwiseInt8Codec()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = plain.encode(values)
        assert torch.equal(native.encode(values), expected)
        assert torch.equal(native.decode(expected), plain.decode(expected))
        assert torch.equal(plain.encode_with_residual(lost), expected)
        assert torch.equal(native.encode_with_residual(native_lost), expected)
        assert torch.equal(native_lost, lost)
        beside_others = values[:, 256:1024]
        assert torch.equal(native.encode(beside_others), plain.encode(beside_others))
        assert torch.equal(native.decode(expected[1:]), plain.decode(expected[1:]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_native_code_hides_no_value_that_is_not_finite(native: BlockwiseInt8Codec, bad: float) -> None:
    values = torch.ones(2, 512)
    values[1, 300] = bad
    encoded = native.encode_with_residual(values)
    back = native.decode(encoded)
    assert not back[1, 256:].isfinite().any()
    assert back[0].isfinite().all()
    assert back[1, :256].isfinite().all()
    assert not values[1, 256:].isfinite().any(), "nor in what is owed"
    assert torch.equal(values[1, :256], torch.ones(256) - back[1, :256])
