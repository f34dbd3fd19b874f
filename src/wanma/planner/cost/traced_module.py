"""Step time of any module under a plan: its operators, as `models.measure` read them, on one device's
roofline; `step` makes a step of them.

Where a plan splits more than samples, what is known of the split is used: `tp` shares the products of blocks
and exchanges their outputs, `cp` shares the samples' tokens, `pp` the blocks. Pure functions, without torch.
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
"""What memory moves at least, however little is asked for: two sectors of 32 bytes (NVIDIA, "CUDA C++ Best
Practices Guide", section 10.2.1: coalesced access)."""

_LOSS_KERNELS = 6
_WORTH_TELLING = 0.1
"""Share of a step, from which on the update of embedding tables is told of."""
_NARROW = 16
"""Rows, columns or terms of a product below which tensor cores do not help: a depthwise convolution."""


def module_step_time(
    workload: Workload,
    plan: Plan,
    global_batch: int,
    machine: Machine,
    software: Software | None = None,
) -> StepTime:
    """Forecast of one optimizer step of `global_batch` samples.

    Every parameter is updated in every step, also the rows of an embedding table that no sample asked for:
    gradients are dense, but for tables that say that theirs are not (`Layer.trained_parameters`).

    Raises:
        ValueError: the layers' operators are not known (`Layer.operators`); the machine has fewer devices
            than the plan's ranks, or no rate for its precision.
    """
    return step_of(module_anatomy(workload, plan, global_batch, machine, software))


def module_anatomy(
    workload: Workload,
    plan: Plan,
    global_batch: int,
    machine: Machine,
    software: Software | None = None,
) -> Anatomy:
    """The parts of `module_step_time`; arguments and errors likewise."""
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
    """What a module is made of; of the plan, what `pieces_key` names counts."""
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
    """Whether a module was read operator by operator, so that its time can be told."""
    return any(layer.operators for layer in workload.layers)


def told_of_tables(workload: Workload, step: StepTime) -> tuple[str, ...]:
    """What a user should know of embedding tables that make steps long; empty where they do not."""
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
    """One of a layer's `count`, for one micro-batch on one rank."""
    part = operators_time(layer, plan, machine, software)
    return _with_exchanges(part, layer, plan, machine) if layer.is_block else part


def operators_time(layer: Layer, plan: Plan, machine: Machine, software: Software) -> PartTime:
    """Of the layer's operators alone, without what ranks exchange."""
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
    """One rank's device, and how a plan has it run a layer."""

    chip: Chip
    plan: Plan
    software: Software
    is_block: bool

    @property
    def samples(self) -> float:
        """Of a micro-batch, this rank's share: `cp` cuts them all."""
        return self.plan.micro_batch / self.plan.cp

    @property
    def tp(self) -> int:
        """Ranks that share a product: those of blocks are split."""
        return self.plan.tp if self.is_block else 1

    def seconds(self, operator: Operator) -> float:
        """Of all its kernels."""
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
        shared = self.tp if self.plan.sequence else 1
        return streaming_seconds(self.chip, moved / shared, operator.kernels)

    def _product(self, operator: Operator, product: Product, elements: float) -> float:
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
        """Of a product: that of the plan, but for what libraries do on their own."""
        precision = self.plan.precision
        if operator.kind == "convolution":
            # cuDNN rounds convolutions in fp32 to TF32 unless it is told not to (torch.backends.cudnn).
            return "tf32" if precision == "fp32" and "tf32" in self.chip.products else precision
        return product_precision(self.plan, self.software) if self.is_block else precision

    def _attention(self, operator: Operator, attention: Attention) -> float:
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
"""Terms of a part, below which adding up the parts costs more than they save."""


def _with_exchanges(part: PartTime, layer: Layer, plan: Plan, machine: Machine) -> PartTime:
    """With a block's communication under `tp` and `cp`, which are those of `operators.block_time`."""
    moved = (layer.input_elements_per_sample or 0.0) * plan.micro_batch / plan.cp
    moved *= ELEMENT_BYTES[plan.precision]
    if plan.tp > 1:
        group = Group(plan.tp)
        one = (
            2 * all_gather_seconds(machine, group, moved)
            if plan.sequence
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
    """Keys and values of the other ranks, none of it hidden: how long attention takes is its machine's."""
    element = ELEMENT_BYTES[plan.precision]
    share = attention.sequences * plan.micro_batch / plan.cp * element / plan.tp
    widths = attention.head_width + attention.value_width
    keys_and_values = share * attention.keys * attention.kv_heads * widths
    if plan.context == "all_to_all":
        queries = share * attention.queries * attention.heads * widths
        return all_to_all_seconds(machine, Group(plan.cp, plan.tp), keys_and_values + queries)
    return (plan.cp - 1) * send_seconds(machine, plan.tp, keys_and_values)


def _times(part: PartTime, count: int) -> PartTime:
    if count == 1:
        return part
    return PartTime(**{name: count * value for name, value in vars(part).items()})


def _loss_time(workload: Workload, plan: Plan, machine: Machine, software: Software) -> PartTime:
    """Cross entropy over the outputs, or what else is computed from each of them."""
    outputs = (workload.output_elements_per_sample or 0.0) * plan.micro_batch / plan.cp / plan.tp
    half = streaming_seconds(machine.chip, outputs * software.loss_bytes / 2, _LOSS_KERNELS)
    return PartTime(half, half, kernels_forward=_LOSS_KERNELS, kernels_backward=_LOSS_KERNELS)


def module_boundary_seconds(workload: Workload, plan: Plan, machine: Machine) -> float:
    """A stage's output to the next rank, which is what a block is given; as `decoder.boundary_seconds`."""
    if plan.pp == 1:
        return 0.0
    widest = max(
        (layer.input_elements_per_sample or 0.0 for layer in workload.layers if layer.is_block), default=0.0
    )
    whole = plan.micro_batch / plan.cp * widest * ELEMENT_BYTES[plan.precision]
    seconds = send_seconds(machine, plan.stage_ranks, whole / plan.tp)
    return seconds if plan.sequence else seconds + all_gather_seconds(machine, Group(plan.tp), whole)
