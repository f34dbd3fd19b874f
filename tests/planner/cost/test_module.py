"""Step time of any module: by hand for small ones, and what helps or hurts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from benchmarks.planner.step_times import decoder_step_time, module_step_time
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.machines import CHIP, machine
from support.modules import ImageTransformer, Recommender
from wanma.job.forecast.forecast import LayerWorkload, StepTime, Workload
from wanma.job.forecast.operators import Operator
from wanma.job.plan.plan import Plan
from wanma.models.architectures.decoder import Decoder
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import trace_module_workload
from wanma.planner.cost.data_parallel import OVERLAP_SLOWDOWN, DataParallelCost
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.traced_module import (
    embedding_table_reasons,
    layer_cost,
    module_stage_send_seconds,
    operators_cost,
)
from wanma.planner.hardware_model.collective_time import (
    RankGroup,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import DeviceModel, HardwareModel, LinkLevel, MatmulCurve
from wanma.planner.hardware_model.operator_time import matmul_seconds, memory_bound_seconds

PLAN = Plan(precision="bf16", device="cuda", micro_batch=256)
ALONE = FrameworkTraits(cuda_graphs=True)
"""The host is never behind: small models' kernels are all that counts."""
DECODER = DecoderConfig(4, 1024, 16, 4, 2816, 32000)
TF32 = replace(
    CHIP,
    peak_flops_per_second={"fp32": 20e12, "tf32": 50e12},
    products={"fp32": MatmulCurve(0.9, 0), "tf32": MatmulCurve(0.9, 0)},
)


@cache
def perceptron() -> Workload:
    model = nn.Sequential(nn.Linear(2048, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 1024, bias=False))
    return trace_module_workload(model, (torch.zeros(1, 2048),), blocks=(), precision="bf16")


@cache
def image_transformer() -> Workload:
    with torch.device("meta"):
        model = ImageTransformer(hidden=512, heads=8, layers=8, patch=16, size=224)
    return trace_module_workload(model, (torch.zeros(1, 3, 224, 224, device="meta"),), precision="bf16")


@cache
def decoder() -> Workload:
    with torch.device("meta"):
        model = Decoder(DECODER)
    names = [f"layers.{number}" for number in range(DECODER.layers)]
    tokens = torch.zeros(1, 2048, dtype=torch.int64)
    return trace_module_workload(model, (tokens,), 2048, blocks=names, precision="bf16")


@cache
def recommender() -> Workload:
    return trace_module_workload(
        lambda: Recommender(rows=(2_000_000, 3_000_000), width=64),
        (torch.zeros(1, 13), torch.zeros(1, 2, 4, dtype=torch.int64)),
        precision="bf16",
    )


def forecast(workload: Workload, plan: Plan = PLAN, **changes: object) -> StepTime:
    inputs = {"global_batch": 512, "hardware": machine(32), "framework": ALONE}
    return module_step_time(workload, plan, **{**inputs, **changes})  # type: ignore[arg-type]


def test_a_network_of_two_layers_by_hand() -> None:
    rows = 8192
    plan = replace(PLAN, micro_batch=rows)
    products = [
        (rows, 4096, 2048),  # forward
        (rows, 1024, 4096),
        (rows, 4096, 1024),  # gradients of inputs; of the data there is none
        (4096, 2048, rows),  # and of weights
        (1024, 4096, rows),
    ]
    # Read and write; and backward a gradient and what forward gave, for another gradient.
    relu = memory_bound_seconds(CHIP, (2 + 3) * 2 * rows * 4096, 2)
    # Of cross entropy: 28 bytes per output, in six kernels each way.
    loss = memory_bound_seconds(CHIP, 28 * rows * 1024, 12)
    by_hand = sum(matmul_seconds(CHIP, *sizes, "bf16") for sizes in products) + relu + loss
    layers = (2048 * 4096, 4096 * 1024)
    # Master weights become weights in 16 bits, and gradients are put aside, whatever the model.
    data = DataParallelCost(plan, machine(32), ALONE)
    around = sum(data.casting_seconds(size) + data.accumulation_seconds(size, 1) for size in layers)
    one = forecast(perceptron(), plan, global_batch=rows)
    # The last wave of tiles is filled up with parts of sums, which by hand it is not.
    assert by_hand + around == pytest.approx(one.compute, rel=0.02)
    assert by_hand + around >= one.compute
    parameters = sum(layers)
    assert one.optimizer == pytest.approx(memory_bound_seconds(CHIP, 42 * parameters, 20))


def test_a_convolution_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.Conv2d(64, 128, 3, padding=1))
    workload = trace_module_workload(model, (torch.zeros(1, 64, 56, 56),), blocks=(), precision="bf16")
    part = layer_cost(workload.layers[0], PLAN, machine(1), replace(ALONE, channels_last=True))
    pixels = 256 * 56 * 56
    moved = 2 * pixels * 64 + 64 * 64 * 9
    assert part.forward == pytest.approx(matmul_seconds(CHIP, pixels, 64, 576, "bf16", moved_elements=moved))
    # Windows overlap, and a pixel is read once: where memory is slow, a ninth of what a product would read.
    slow = HardwareModel(replace(CHIP, bandwidth_bytes_per_second=0.1e12), (LinkLevel(1, 0, 1),))
    bound = layer_cost(workload.layers[0], PLAN, slow, replace(ALONE, channels_last=True))
    assert bound.forward == pytest.approx(2 * moved / 0.08e12, rel=1e-3)
    assert part.backward_input == 0.0  # nobody asks for the gradient of the images
    # With channels outermost what it reads and writes is turned round.
    turned = layer_cost(workload.layers[0], PLAN, machine(1), ALONE)
    extra = memory_bound_seconds(CHIP, 2 * 2 * 2 * pixels * 64, 3)
    assert turned.forward - part.forward == pytest.approx(extra)


def test_a_convolution_of_single_channels_streams() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False))
    workload = trace_module_workload(model, (torch.zeros(1, 64, 56, 56),), blocks=(), precision="bf16")
    part = layer_cost(workload.layers[0], PLAN, machine(1), replace(ALONE, channels_last=True))
    moved = 2 * (2 * 256 * 64 * 56 * 56 + 64 * 9)
    assert part.forward == pytest.approx(memory_bound_seconds(CHIP, moved))


def test_sums_over_many_samples_are_cut_to_fill_the_device() -> None:
    """Four tiles of a weight's gradient would leave 96 of 100 multiprocessors idle."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    workload = trace_module_workload(model, (torch.zeros(1, 256),), blocks=(), precision="bf16")
    part = layer_cost(workload.layers[0], replace(PLAN, micro_batch=65536), machine(1), ALONE)
    whole = matmul_seconds(CHIP, 256, 256, 65536, "bf16")
    assert part.backward_weight < whole / 4
    assert part.backward_weight > 2 * 256 * 256 * 65536 / 100e12


def test_convolutions_in_32_bits_are_rounded_where_the_device_can() -> None:
    model = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.Linear(56, 56))
    workload = trace_module_workload(model, (torch.zeros(1, 256, 56, 56),), blocks=(), precision="fp32")
    plan = replace(PLAN, precision="fp32", micro_batch=16)
    fast = HardwareModel(TF32, (LinkLevel(1, 0, 1),))
    plain = replace(TF32, peak_flops_per_second={"fp32": 20e12}, products={"fp32": TF32.products["fp32"]})
    slow = HardwareModel(plain, (LinkLevel(1, 0, 1),))
    software = replace(ALONE, channels_last=True)
    convolution, linear = workload.layers
    assert layer_cost(convolution, plan, fast, software).forward == pytest.approx(
        layer_cost(convolution, plan, slow, software).forward * 20 / 50, rel=0.02
    )
    assert layer_cost(linear, plan, fast, software) == layer_cost(linear, plan, slow, software)


@pytest.mark.parametrize("replicas", [2, 8])
def test_replicas_reduce_every_gradient_once(replicas: int) -> None:
    plan = replace(PLAN, dp_replicate=replicas)
    found = forecast(perceptron(), plan, framework=replace(ALONE, data_overlap=False))
    gradients = 4 * perceptron().parameters
    assert found.data == pytest.approx(all_reduce_seconds(machine(32), RankGroup(replicas), gradients))
    hidden = forecast(perceptron(), plan, framework=ALONE)
    assert found.data * OVERLAP_SLOWDOWN <= hidden.data * (1 + 1e-9)
    assert hidden.data <= found.data


def test_shards_scatter_gradients_and_gather_weights() -> None:
    plan = replace(PLAN, dp_shard=8, shard="optimizer")
    found = forecast(perceptron(), plan, framework=replace(ALONE, data_overlap=False))
    parameters = perceptron().parameters
    assert found.data == pytest.approx(
        reduce_scatter_seconds(machine(32), RankGroup(8), 4 * parameters)
        + all_gather_seconds(machine(32), RankGroup(8), 2 * parameters)
    )


def test_a_dense_update_passes_over_whole_tables() -> None:
    found = forecast(recommender())
    tables = 64 * 5_000_000
    assert found.optimizer == pytest.approx(42 * tables / 0.8e12, rel=0.01)
    sparse = trace_module_workload(
        lambda: Recommender(rows=(2_000_000, 3_000_000), width=64, sparse=True),
        (torch.zeros(1, 13), torch.zeros(1, 2, 4, dtype=torch.int64)),
        precision="bf16",
    )
    assert forecast(sparse).optimizer < found.optimizer / 100
    (told,) = embedding_table_reasons(recommender(), found)
    assert "0.32 billion parameters" in told
    assert embedding_table_reasons(sparse, forecast(sparse)) == ()
    assert embedding_table_reasons(image_transformer(), forecast(image_transformer())) == ()


def test_short_rows_cost_a_whole_access() -> None:
    def lookup(width: int) -> float:
        layer = LayerWorkload(
            "table",
            1,
            0,
            0.0,
            0.0,
            operators=(
                Operator("lookup", "forward", 1, 1000.0 * width, embedding_row_elements=float(width)),
            ),
        )
        return layer_cost(layer, PLAN, machine(1), ALONE).forward - CHIP.launch_seconds

    assert lookup(32) == pytest.approx(256 * 1000 * 32 * 2 / 0.8e12)
    assert lookup(1) == pytest.approx(lookup(32))  # 64 bytes


def test_a_compiled_model_moves_less_and_launches_fewer() -> None:
    compiled = FrameworkTraits(fuses_pointwise=True)
    eager, fused = (
        layer_cost(decoder().layers[1], PLAN, machine(1), one) for one in (FrameworkTraits(), compiled)
    )
    assert 0.5 < fused.forward / eager.forward < 0.9
    assert fused.kernels_forward < eager.kernels_forward / 2
    assert fused.kernels_backward < eager.kernels_backward / 2


def test_a_slow_host_sets_the_pace() -> None:
    one = replace(PLAN, micro_batch=1)
    slow = replace(machine(32), dispatch_seconds=1e-3)
    behind = forecast(image_transformer(), one, hardware=slow, framework=FrameworkTraits())
    assert behind.compute > 5 * forecast(image_transformer(), one).compute


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_runs_blocks_again(recompute: str) -> None:
    plain = forecast(image_transformer())
    again = forecast(image_transformer(), replace(PLAN, recompute=recompute))  # type: ignore[arg-type]
    extra = again.compute / plain.compute - 1
    assert (0.28 < extra < 0.38) if recompute == "full" else (0.05 < extra < 0.28)


def test_what_is_known_of_a_split_is_used() -> None:
    whole = forecast(image_transformer())
    split = forecast(image_transformer(), replace(PLAN, tp=4, sequence_parallel=True))
    # Two exchanges forward and two backward in each of 8 blocks, of all that a block is given.
    given = 256 * 197 * 512 * 2
    one = 2 * all_gather_seconds(machine(32), RankGroup(4), given)
    assert split.tensor == pytest.approx(2 * 8 * 4 * one)
    assert 0.2 < split.compute / whole.compute < 0.5
    staged = forecast(image_transformer(), replace(PLAN, pp=4, micro_batch=64))
    assert staged.bubble > 0
    assert staged.seconds < whole.seconds
    sent = send_seconds(machine(32), 1, given / 4)
    assert module_stage_send_seconds(
        image_transformer(), replace(PLAN, pp=4, micro_batch=64), machine(32)
    ) == pytest.approx(sent)
    shared = forecast(image_transformer(), replace(PLAN, cp=2))
    assert shared.context > 0
    assert 0.4 < shared.compute / whole.compute < 0.7


def test_a_rank_moves_one_operand_of_a_split_product_whole() -> None:
    model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 512, bias=False))
    workload = trace_module_workload(model, (torch.zeros(1, 512),), blocks=("0", "2"), precision="bf16")
    slow = HardwareModel(replace(CHIP, bandwidth_bytes_per_second=0.1e12), (LinkLevel(1, 0, 1),))
    rows, weights = 1 << 16, 512 * 1024 / 4
    plan = replace(PLAN, tp=4, micro_batch=rows)
    last = [layer for layer in workload.layers if layer.is_block][-1]
    part = operators_cost(last, plan, slow, ALONE)
    for seconds, whole, split in (
        (part.forward, 1024, 512),
        (part.backward_input, 512, 1024),
        (part.backward_weight, 512, 1024),
    ):
        moved = rows * (whole + split / 4) + weights
        assert seconds == pytest.approx(2 * moved / 0.08e12, rel=0.02), "beside launches and parts of sums"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_decoder_that_was_read_takes_as_long_as_one_by_formula(recompute: str) -> None:
    plan = replace(PLAN, micro_batch=4, recompute=recompute)  # type: ignore[arg-type]
    read = module_step_time(decoder(), plan, 8, machine(1), ALONE)
    formula = decoder_step_time(DECODER, 2048, plan, 8, machine(1), ALONE)
    assert read.seconds == pytest.approx(formula.seconds, rel=0.1)


def test_without_operators_there_is_no_time() -> None:
    with pytest.raises(ValueError, match="layers are not known"):
        module_step_time(Workload((LayerWorkload("one", 1, 1, 1.0, 1.0),), 1), PLAN, 256, machine(1))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([16, 32, 64, 128]), st.integers(2, 4), st.sampled_from([1, 2, 8]))
def test_a_larger_batch_is_never_faster(size: int, times: int, replicas: int) -> None:
    plan = replace(PLAN, micro_batch=size, dp_replicate=replicas)
    for workload in (perceptron(), image_transformer(), recommender()):
        small = forecast(workload, plan, global_batch=size * replicas)
        large = forecast(workload, plan, global_batch=times * size * replicas)
        wide = forecast(
            workload, replace(plan, micro_batch=times * size), global_batch=times * size * replicas
        )
        assert small.seconds < large.seconds
        assert small.seconds < wide.seconds


@settings(max_examples=20, deadline=None)
@given(st.floats(1.0, 8.0), st.booleans(), st.sampled_from(["none", "full"]))
def test_a_faster_chip_is_never_slower(factor: float, computes: bool, recompute: str) -> None:
    plan = replace(PLAN, dp_shard=8, shard="parameters", recompute=recompute)  # type: ignore[arg-type]
    peaks = {name: factor * peak for name, peak in CHIP.peak_flops_per_second.items()}
    fast: DeviceModel = (
        replace(CHIP, peak_flops_per_second=peaks)
        if computes
        else replace(CHIP, bandwidth_bytes_per_second=factor * CHIP.bandwidth_bytes_per_second)
    )
    faster = replace(machine(32), chip=fast)
    for workload in (perceptron(), image_transformer(), recommender()):
        plain = forecast(workload, plan)
        assert forecast(workload, plan, hardware=faster).seconds <= plain.seconds * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["none", "optimizer", "gradients", "parameters"]))
def test_kinds_add_up_to_the_step(ranks: int, shard: str) -> None:
    sharded = {"dp_shard": ranks, "shard": shard} if shard != "none" else {"dp_replicate": ranks}
    found = forecast(image_transformer(), replace(PLAN, **sharded))  # type: ignore[arg-type]
    total = found.compute + found.data + found.bubble + found.optimizer
    assert total == pytest.approx(found.seconds)
