"""Step time of any module under a plan: its traced operators on the roofline of one device.

`cost.step` assembles the stages to a step. For a plan that splits more than samples, the known part of the
split counts: `tp` splits the products of blocks and exchanges their outputs, `cp` splits the samples' tokens,
`pp` the blocks. Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from wanma.job.forecast.forecast import LayerWorkload, StepTime, Workload
from wanma.job.forecast.operators import Attention, Matmul, Operator
from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import FrameworkTraits, matmul_precision
from wanma.planner.cost.embedding_exchange import embedding_cost
from wanma.planner.cost.layer_cost import LayerCost
from wanma.planner.cost.model_cost import BlockGroup, EndLayer, ModelCost
from wanma.planner.hardware_model.collective_time import (
    RankGroup,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import DeviceModel, HardwareModel
from wanma.planner.hardware_model.operator_time import (
    ELEMENT_BYTES,
    attention_seconds,
    matmul_seconds,
    memory_bound_seconds,
)

MIN_MEMORY_ACCESS_BYTES = 64.0
"""Smallest memory transaction in bytes: two sectors of 32 (NVIDIA, "CUDA C++ Best Practices Guide", section
10.2.1: coalesced access)."""

_BACKWARD_FIELDS = {"inputs": "backward_input", "weights": "backward_weight"}
"""Field of `LayerCost` by the phase of an operator that runs in backward."""
_LOSS_KERNELS = 6
_REPORTED_SHARE = 0.1
"""Share of a step from which the update of embedding tables is reported to the user, 0 .. 1."""
_MIN_TENSOR_CORE_DIMENSION = 16
"""Rows, columns or terms of a product below which tensor cores do not help, as in a depthwise convolution."""


def module_model_cost(
    workload: Workload, plan: Plan, hardware: HardwareModel, framework: FrameworkTraits
) -> ModelCost:
    """Return the layer costs of a module; of the plan only the settings in `model_cost_key` count."""
    parts = [layer_cost(layer, plan, hardware, framework) for layer in workload.layers]
    first = next((number for number, layer in enumerate(workload.layers) if layer.is_block), 0)
    before: list[EndLayer] = []
    after: list[EndLayer] = []
    blocks: list[BlockGroup] = []
    for number, (layer, part) in enumerate(zip(workload.layers, parts, strict=True)):
        if layer.is_block:
            blocks.append(BlockGroup(part, layer.count, float(layer.parameters)))
        else:
            end = EndLayer(_scaled_cost(part, layer.count), float(layer.count * layer.parameters))
            (before if number < first else after).append(end)
    if workload.tables:
        before.append(EndLayer(embedding_cost(workload.tables, plan, hardware), 0.0))
    after.append(EndLayer(_loss_cost(workload, plan, hardware, framework), 0.0))
    return ModelCost(tuple(before), tuple(blocks), tuple(after))


def has_operators(workload: Workload) -> bool:
    """Return whether a module was traced operator by operator, so that its time can be forecast."""
    return any(layer.operators for layer in workload.layers)


def embedding_table_reasons(workload: Workload, step: StepTime) -> tuple[str, ...]:
    """Return messages about embedding tables that make steps long; empty where they do not."""
    tables = sum(
        layer.count * layer.parameters * layer.trainable_share
        for layer in workload.layers
        if any(operator.kind == "lookup" and operator.phase == "forward" for operator in layer.operators)
    )
    share = step.optimizer / step.seconds
    if share < _REPORTED_SHARE or 2 * tables < workload.parameters:
        return ()
    return (
        f"the optimizer update takes {share:.0%} of a step: it updates all rows of the embedding "
        f"tables, {tables / 1000000000.0:.3g} billion parameters, also rows that the step does not use",
    )


def layer_cost(
    layer: LayerWorkload, plan: Plan, hardware: HardwareModel, framework: FrameworkTraits
) -> LayerCost:
    """Return the cost of one of a layer's `count`, for one micro-batch on one rank."""
    part = operators_cost(layer, plan, hardware, framework)
    return _with_communication(part, layer, plan, hardware) if layer.is_block else part


def operators_cost(
    layer: LayerWorkload, plan: Plan, hardware: HardwareModel, framework: FrameworkTraits
) -> LayerCost:
    """Return the cost of the layer's operators alone, without communication between ranks."""
    device = _LayerTimer(hardware.chip, plan, framework, layer.is_block)
    left_out = "eager" if framework.fuses_pointwise else "compiled"
    part = LayerCost()
    for operator in layer.operators:
        if operator.execution_mode == left_out:
            continue
        seconds = device.seconds(operator)
        runs_again = operator.phase == "forward" and (
            plan.recompute == "full"
            or (plan.recompute == "selective" and not operator.is_saved_by_selective_recompute)
        )
        if operator.phase == "forward":
            part = replace(
                part,
                forward=part.forward + seconds,
                kernels_forward=part.kernels_forward + operator.kernel_count,
                recompute=part.recompute + (seconds if runs_again else 0.0),
                kernels_recompute=part.kernels_recompute + (operator.kernel_count if runs_again else 0),
            )
        else:
            name = _BACKWARD_FIELDS[operator.phase]
            part = replace(
                part,
                **{name: getattr(part, name) + seconds},
                kernels_backward=part.kernels_backward + operator.kernel_count,
            )
    return part


@dataclass(frozen=True)
class _LayerTimer:
    """Device of one rank and the settings of a plan under which it runs a layer."""

    chip: DeviceModel
    plan: Plan
    framework: FrameworkTraits
    is_block: bool

    @property
    def samples(self) -> float:
        """Return this rank's share of a micro-batch, in samples; `cp` splits each of them."""
        return self.plan.micro_batch / self.plan.cp

    @property
    def tp(self) -> int:
        """Return the number of ranks that share a product; only products of blocks are split."""
        return self.plan.tp if self.is_block else 1

    def seconds(self, operator: Operator) -> float:
        """Return the seconds of all kernels of an operator."""
        elements = operator.elements_per_sample * self.samples
        if operator.matmul is not None:
            elements *= _split_elements_share(operator.matmul, self.tp)
        elements += operator.fixed_elements / self.tp
        if operator.matmul is not None:
            return self._matmul_seconds(operator, operator.matmul, elements)
        if operator.attention is not None:
            return operator.kernel_count * self._attention_seconds(operator, operator.attention)
        traffic = elements * ELEMENT_BYTES[self.plan.precision]
        if operator.embedding_row_elements is not None:
            row = operator.embedding_row_elements * ELEMENT_BYTES[self.plan.precision]
            traffic *= max(1.0, MIN_MEMORY_ACCESS_BYTES / row)
        # Between split products each rank has a part of the sequence, or of the width.
        shared = self.tp if self.plan.sequence_parallel else 1
        return memory_bound_seconds(self.chip, traffic / shared, operator.kernel_count)

    def _matmul_seconds(self, operator: Operator, product: Matmul, elements: float) -> float:
        """Return the seconds of an operator that is a product or a convolution."""
        sized = product.for_micro_batch(self.samples)
        precision = self._precision(operator)
        kernel_elements = elements / operator.kernel_count
        m, n, k, count = sized.m, sized.n / self.tp, sized.k, max(sized.count, 1.0)
        if count > 1 and operator.kind == "convolution" and min(n, k) < _MIN_TENSOR_CORE_DIMENSION:
            # Each channel on its own: too narrow to be multiplied by blocks, it streams.
            return operator.kernel_count * memory_bound_seconds(
                self.chip, kernel_elements * ELEMENT_BYTES[precision]
            )
        # Where a product has fewer tiles than there are multiprocessors, its sums are cut into parts.
        kernel_seconds = min(
            matmul_seconds(
                self.chip,
                m,
                n,
                k / parts,
                precision,
                round(count * parts),
                moved_elements=kernel_elements + (2.0 * parts * m * n * count if parts > 1 else 0.0),
            )
            for parts in _SPLIT_K_FACTORS
            if parts == 1 or k / parts >= _MIN_SPLIT_K
        )
        layout_seconds = 0.0
        if (
            operator.kind == "convolution"
            and precision in _TENSOR_CORE_PRECISIONS
            and not self.framework.channels_last
        ):
            both_ways = 2 * operator.elements_per_sample * self.samples * ELEMENT_BYTES[precision]
            layout_seconds = memory_bound_seconds(self.chip, both_ways, 3 * operator.kernel_count)
        return operator.kernel_count * kernel_seconds + layout_seconds

    def _precision(self, operator: Operator) -> str:
        """Return the precision of a product: the plan's, unless a library chooses its own."""
        precision = self.plan.precision
        if operator.kind == "convolution":
            # cuDNN rounds convolutions in fp32 to TF32 unless it is told not to (torch.backends.cudnn).
            return "tf32" if precision == "fp32" and "tf32" in self.chip.products else precision
        return matmul_precision(self.plan, self.framework) if self.is_block else precision

    def _attention_seconds(self, operator: Operator, attention: Attention) -> float:
        """Return the seconds of one kernel of fused attention."""
        return attention_seconds(
            self.chip,
            attention.sequences * self.samples,
            attention.queries,
            attention.keys,
            attention.heads / self.tp,
            attention.head_dim,
            kv_heads=max(attention.kv_heads / self.tp, 1.0),
            value_head_dim=attention.value_head_dim,
            causal=attention.is_causal,
            backward=operator.phase != "forward",
            efficiency=self.framework.attention_efficiency,
            precision=self.plan.precision,
        )


def _split_elements_share(product: Matmul, tp: int) -> float:
    """Return the share of a product's elements that one of `tp` ranks moves, of those that grow with samples.

    The ranks split the columns, n, or the rows where the samples are the columns: one operand is whole on
    each rank, and of the other and of the result each has a part.
    """
    split = "m" if product.batch_dimension == "n" else "n"
    operands = [
        (names, float(prod(getattr(product, name) for name in names)))
        for names in (("m", "k"), ("k", "n"), ("m", "n"))
        if product.batch_dimension in (*names, "count")
    ]
    total = sum(elements for _, elements in operands)
    if not total:
        return 1.0
    return sum(elements / (tp if split in names else 1) for names, elements in operands) / total


_TENSOR_CORE_PRECISIONS = ("tf32", "bf16", "fp16", "fp8", "nvfp4")
_SPLIT_K_FACTORS = (1, 2, 4, 8, 16, 32, 64)
_MIN_SPLIT_K = 256.0
"""Terms of one part of a split sum; with fewer, adding the parts costs more than it saves."""


def _with_communication(
    cost: LayerCost, layer: LayerWorkload, plan: Plan, hardware: HardwareModel
) -> LayerCost:
    """Return `cost` with a block's communication under `tp` and `cp`, as `block_cost` has it."""
    input_bytes = (layer.full_recompute_elements_per_sample or 0.0) * plan.micro_batch / plan.cp
    input_bytes *= ELEMENT_BYTES[plan.precision]
    if plan.tp > 1:
        group = RankGroup(plan.tp)
        exchange_seconds = (
            2 * all_gather_seconds(hardware, group, input_bytes)
            if plan.sequence_parallel
            else all_reduce_seconds(hardware, group, input_bytes)
        )
        cost = replace(
            cost,
            tensor_forward=2 * exchange_seconds,
            tensor_backward=2 * exchange_seconds,
            tensor_recompute=2 * exchange_seconds if plan.recompute == "full" else 0.0,
        )
    if plan.cp > 1:
        context = sum(
            operator.kernel_count * _context_seconds(operator.attention, plan, hardware)
            for operator in layer.operators
            if operator.attention is not None and operator.phase == "forward"
        )
        cost = replace(cost, context_forward=context, context_backward=2 * context)
    return cost


def _context_seconds(attention: Attention, plan: Plan, hardware: HardwareModel) -> float:
    """Return the seconds of exchanging keys and values under `cp`, none of them hidden."""
    element = ELEMENT_BYTES[plan.precision]
    share = attention.sequences * plan.micro_batch / plan.cp * element / plan.tp
    widths = attention.head_dim + attention.value_head_dim
    keys_and_values = share * attention.keys * attention.kv_heads * widths
    if plan.cp_method == "all_to_all":
        queries = share * attention.queries * attention.heads * widths
        return all_to_all_seconds(hardware, RankGroup(plan.cp, plan.tp), keys_and_values + queries)
    return (plan.cp - 1) * send_seconds(hardware, plan.tp, keys_and_values)


def _scaled_cost(cost: LayerCost, count: int) -> LayerCost:
    """Return the cost of `count` equal layers."""
    if count == 1:
        return cost
    return LayerCost(**{name: count * value for name, value in vars(cost).items()})


def _loss_cost(
    workload: Workload, plan: Plan, hardware: HardwareModel, framework: FrameworkTraits
) -> LayerCost:
    """Return the cost of the loss: cross entropy, or another function, over the outputs."""
    outputs = (workload.output_elements_per_sample or 0.0) * plan.micro_batch / plan.cp / plan.tp
    pass_seconds = memory_bound_seconds(hardware.chip, outputs * framework.loss_bytes / 2, _LOSS_KERNELS)
    return LayerCost(
        pass_seconds, pass_seconds, kernels_forward=_LOSS_KERNELS, kernels_backward=_LOSS_KERNELS
    )


def module_stage_send_seconds(workload: Workload, plan: Plan, hardware: HardwareModel) -> float:
    """Return the seconds of sending a stage's output, which is a block's input, to the next pipeline rank."""
    if plan.pp == 1:
        return 0.0
    widest = max(
        (layer.full_recompute_elements_per_sample or 0.0 for layer in workload.layers if layer.is_block),
        default=0.0,
    )
    output_bytes = plan.micro_batch / plan.cp * widest * ELEMENT_BYTES[plan.precision]
    seconds = send_seconds(hardware, plan.ranks_per_pipeline_rank, output_bytes / plan.tp)
    return (
        seconds
        if plan.sequence_parallel
        else seconds + all_gather_seconds(hardware, RankGroup(plan.tp), output_bytes)
    )
