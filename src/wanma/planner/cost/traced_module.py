"""Step time of any module under a plan: its traced operators on the roofline of one device.

`cost.step` assembles the stages to a step. For a plan that splits more than samples, the known part of the
split counts: `tp` splits the products of blocks and exchanges their outputs, `cp` splits the samples' tokens,
`pp` the blocks. Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wanma.job.forecast.forecast import Layer, StepTime, Workload
from wanma.job.forecast.operators import Attention, Operator, Product
from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import PartTime, Software, product_precision
from wanma.planner.cost.model_cost import Blocks, End, Pieces, stages_of
from wanma.planner.cost.step import Anatomy, anatomy_of_stages, step_of
from wanma.planner.hardware_model.collective_time import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import Chip, Machine
from wanma.planner.hardware_model.operator_time import (
    ELEMENT_BYTES,
    attention_seconds,
    product_seconds,
    streaming_seconds,
)

SECTOR_BYTES = 64.0
"""Smallest memory transaction in bytes: two sectors of 32 (NVIDIA, "CUDA C++ Best Practices Guide", section
10.2.1: coalesced access)."""

_LOSS_KERNELS = 6
_WORTH_TELLING = 0.1
"""Share of a step from which the update of embedding tables is reported to the user, 0 .. 1."""
_NARROW = 16
"""Rows, columns or terms of a product below which tensor cores do not help, as in a depthwise convolution."""


def module_step_time(
    workload: Workload,
    plan: Plan,
    global_batch: int,
    machine: Machine,
    software: Software | None = None,
) -> StepTime:
    """Return the forecast of one optimizer step of `global_batch` samples.

    Every parameter is updated in every step, including rows of an embedding table that no sample reads:
    gradients are dense, except for tables that declare otherwise (`Layer.trained_parameters`).

    Raises:
        ValueError: the layers' operators are not known (`Layer.operators`); the hardware model has fewer
            devices than the plan has ranks, or no rate for its precision.
    """
    return step_of(module_anatomy(workload, plan, global_batch, machine, software))


def module_anatomy(
    workload: Workload,
    plan: Plan,
    global_batch: int,
    machine: Machine,
    software: Software | None = None,
) -> Anatomy:
    """Return the components of `module_step_time`; arguments and errors likewise."""
    if not knows_operators(workload):
        raise ValueError("the operators of the model's layers are not known one by one")
    software = software or Software(fused=plan.compile)
    return anatomy_of_stages(
        stages_of(module_pieces(workload, plan, machine, software), plan),
        plan,
        plan.accumulation(global_batch),
        machine,
        software,
        boundary_seconds=module_boundary_seconds(workload, plan, machine),
        trained_share=workload.trained_share,
    )


def module_pieces(workload: Workload, plan: Plan, machine: Machine, software: Software) -> Pieces:
    """Return the layer costs of a module; only the settings of the plan in `pieces_key` influence them."""
    parts = [part_time(layer, plan, machine, software) for layer in workload.layers]
    first = next((number for number, layer in enumerate(workload.layers) if layer.is_block), 0)
    before: list[End] = []
    after: list[End] = []
    blocks: list[Blocks] = []
    for number, (layer, part) in enumerate(zip(workload.layers, parts, strict=True)):
        if layer.is_block:
            blocks.append(Blocks(part, layer.count, float(layer.parameters)))
        else:
            end = End(_times(part, layer.count), float(layer.count * layer.parameters))
            (before if number < first else after).append(end)
    after.append(End(_loss_time(workload, plan, machine, software), 0.0))
    return Pieces(tuple(before), tuple(blocks), tuple(after))


def knows_operators(workload: Workload) -> bool:
    """Return whether a module was traced operator by operator, so that its time can be forecast."""
    return any(layer.operators for layer in workload.layers)


def told_of_tables(workload: Workload, step: StepTime) -> tuple[str, ...]:
    """Return messages about embedding tables that make steps long; empty where they do not."""
    tables = sum(
        layer.count * layer.parameters * layer.trained_share
        for layer in workload.layers
        if any(one.kind == "lookup" and one.phase == "forward" for one in layer.operators)
    )
    share = step.optimizer / step.seconds
    if share < _WORTH_TELLING or 2 * tables < workload.parameters:
        return ()
    return (
        f"the update is {share:.0%} of a step: it passes over all rows of the embedding tables, "
        f"{tables / 1e9:.3g} billion parameters, whichever of them a step asks for",
    )


def part_time(layer: Layer, plan: Plan, machine: Machine, software: Software) -> PartTime:
    """Return the cost of one of a layer's `count`, for one micro-batch on one rank."""
    part = operators_time(layer, plan, machine, software)
    return _with_exchanges(part, layer, plan, machine) if layer.is_block else part


def operators_time(layer: Layer, plan: Plan, machine: Machine, software: Software) -> PartTime:
    """Return the cost of the layer's operators alone, without communication between ranks."""
    device = _Device(machine.chip, plan, software, layer.is_block)
    left_out = "eager" if software.fused else "compiled"
    part = PartTime()
    for operator in layer.operators:
        if operator.when == left_out:
            continue
        seconds = device.seconds(operator)
        runs_again = operator.phase == "forward" and (
            plan.recompute == "full" or (plan.recompute == "selective" and not operator.is_kept)
        )
        if operator.phase == "forward":
            part = replace(
                part,
                forward=part.forward + seconds,
                kernels_forward=part.kernels_forward + operator.kernels,
                again=part.again + (seconds if runs_again else 0.0),
                kernels_again=part.kernels_again + (operator.kernels if runs_again else 0),
            )
        else:
            name = f"backward_{operator.phase}"
            part = replace(
                part,
                **{name: getattr(part, name) + seconds},
                kernels_backward=part.kernels_backward + operator.kernels,
            )
    return part


@dataclass(frozen=True)
class _Device:
    """Device of one rank and the settings of a plan under which it runs a layer."""

    chip: Chip
    plan: Plan
    software: Software
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
        elements = operator.elements_per_sample * self.samples + operator.elements_fixed / self.tp
        if operator.product is not None:
            return self._product(operator, operator.product, elements)
        if operator.attention is not None:
            return operator.kernels * self._attention(operator, operator.attention)
        moved = elements * ELEMENT_BYTES[self.plan.precision]
        if operator.row_elements is not None:
            row = operator.row_elements * ELEMENT_BYTES[self.plan.precision]
            moved *= max(1.0, SECTOR_BYTES / row)
        # Between split products each rank has a part of the sequence, or of the width.
        shared = self.tp if self.plan.sequence_parallel else 1
        return streaming_seconds(self.chip, moved / shared, operator.kernels)

    def _product(self, operator: Operator, product: Product, elements: float) -> float:
        """Return the seconds of an operator that is a product or a convolution."""
        sized = product.sized(self.samples)
        precision = self._precision(operator)
        moved = elements / operator.kernels
        m, n, k, count = sized.m, sized.n / self.tp, sized.k, max(sized.count, 1.0)
        if count > 1 and operator.kind == "convolution" and min(n, k) < _NARROW:
            # Each channel on its own: too narrow to be multiplied by blocks, it streams.
            return operator.kernels * streaming_seconds(self.chip, moved * ELEMENT_BYTES[precision])
        # Where a product has fewer tiles than there are multiprocessors, its sums are cut into parts.
        one = min(
            product_seconds(
                self.chip,
                m,
                n,
                k / parts,
                precision,
                round(count * parts),
                moved_elements=moved + (2.0 * parts * m * n * count if parts > 1 else 0.0),
            )
            for parts in _PARTS
            if parts == 1 or k / parts >= _SHORTEST_SUM
        )
        turned = 0.0
        if operator.kind == "convolution" and precision in _TENSOR_CORES and not self.software.channels_last:
            both_ways = 2 * operator.elements_per_sample * self.samples * ELEMENT_BYTES[precision]
            turned = streaming_seconds(self.chip, both_ways, 3 * operator.kernels)
        return operator.kernels * one + turned

    def _precision(self, operator: Operator) -> str:
        """Return the precision of a product: the plan's, unless a library chooses its own."""
        precision = self.plan.precision
        if operator.kind == "convolution":
            # cuDNN rounds convolutions in fp32 to TF32 unless it is told not to (torch.backends.cudnn).
            return "tf32" if precision == "fp32" and "tf32" in self.chip.products else precision
        return product_precision(self.plan, self.software) if self.is_block else precision

    def _attention(self, operator: Operator, attention: Attention) -> float:
        """Return the seconds of one kernel of fused attention."""
        return attention_seconds(
            self.chip,
            attention.sequences * self.samples,
            attention.queries,
            attention.keys,
            attention.heads / self.tp,
            attention.head_width,
            kv_heads=max(attention.kv_heads / self.tp, 1.0),
            value_width=attention.value_width,
            causal=attention.causal,
            backward=operator.phase != "forward",
            efficiency=self.software.attention_efficiency,
            precision=self.plan.precision,
        )


_TENSOR_CORES = ("tf32", "bf16", "fp16", "fp8", "nvfp4")
_PARTS = (1, 2, 4, 8, 16, 32, 64)
_SHORTEST_SUM = 256.0
"""Terms of one part of a split sum; with fewer, adding the parts costs more than it saves."""


def _with_exchanges(part: PartTime, layer: Layer, plan: Plan, machine: Machine) -> PartTime:
    """Return `part` with a block's communication under `tp` and `cp`, as `block_time` has it."""
    moved = (layer.input_elements_per_sample or 0.0) * plan.micro_batch / plan.cp
    moved *= ELEMENT_BYTES[plan.precision]
    if plan.tp > 1:
        group = Group(plan.tp)
        one = (
            2 * all_gather_seconds(machine, group, moved)
            if plan.sequence_parallel
            else all_reduce_seconds(machine, group, moved)
        )
        part = replace(
            part,
            tensor_forward=2 * one,
            tensor_backward=2 * one,
            tensor_again=2 * one if plan.recompute == "full" else 0.0,
        )
    if plan.cp > 1:
        context = sum(
            one.kernels * _context_seconds(one.attention, plan, machine)
            for one in layer.operators
            if one.attention is not None and one.phase == "forward"
        )
        part = replace(part, context_forward=context, context_backward=2 * context)
    return part


def _context_seconds(attention: Attention, plan: Plan, machine: Machine) -> float:
    """Return the seconds of exchanging keys and values under `cp`, none of them hidden."""
    element = ELEMENT_BYTES[plan.precision]
    share = attention.sequences * plan.micro_batch / plan.cp * element / plan.tp
    widths = attention.head_width + attention.value_width
    keys_and_values = share * attention.keys * attention.kv_heads * widths
    if plan.cp_method == "all_to_all":
        queries = share * attention.queries * attention.heads * widths
        return all_to_all_seconds(machine, Group(plan.cp, plan.tp), keys_and_values + queries)
    return (plan.cp - 1) * send_seconds(machine, plan.tp, keys_and_values)


def _times(part: PartTime, count: int) -> PartTime:
    """Return the cost of `count` equal layers."""
    if count == 1:
        return part
    return PartTime(**{name: count * value for name, value in vars(part).items()})


def _loss_time(workload: Workload, plan: Plan, machine: Machine, software: Software) -> PartTime:
    """Return the cost of the loss: cross entropy, or another function, over the outputs."""
    outputs = (workload.output_elements_per_sample or 0.0) * plan.micro_batch / plan.cp / plan.tp
    half = streaming_seconds(machine.chip, outputs * software.loss_bytes / 2, _LOSS_KERNELS)
    return PartTime(half, half, kernels_forward=_LOSS_KERNELS, kernels_backward=_LOSS_KERNELS)


def module_boundary_seconds(workload: Workload, plan: Plan, machine: Machine) -> float:
    """Return the seconds of sending a stage's output, which is a block's input, to the next pipeline rank."""
    if plan.pp == 1:
        return 0.0
    widest = max(
        (layer.input_elements_per_sample or 0.0 for layer in workload.layers if layer.is_block), default=0.0
    )
    whole = plan.micro_batch / plan.cp * widest * ELEMENT_BYTES[plan.precision]
    seconds = send_seconds(machine, plan.stage_ranks, whole / plan.tp)
    return seconds if plan.sequence_parallel else seconds + all_gather_seconds(machine, Group(plan.tp), whole)
