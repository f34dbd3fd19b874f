"""Cost of one layer of a model on one rank, and the accumulator that adds up its operators.

Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from wanma.job.plan.plan import Plan
from wanma.planner.hardware_model.model import DeviceModel
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES, matmul_seconds, memory_bound_seconds


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer and micro-batch on one rank: seconds, kernels and bytes."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    recompute: float = 0.0
    """Seconds that recompute would add if every operator of the plan's policy ran again."""
    kernels_forward: int = 0
    kernels_backward: int = 0
    kernels_recompute: int = 0
    tensor_forward: float = 0.0
    """Seconds of exposed tensor-parallel communication in forward; the fields below are the same for
    backward, for recompute, and for the mesh dimensions `cp` and `ep`."""
    tensor_backward: float = 0.0
    tensor_recompute: float = 0.0
    context_forward: float = 0.0
    context_backward: float = 0.0
    expert_forward: float = 0.0
    expert_backward: float = 0.0
    embedding_forward: float = 0.0
    """Seconds of exchanging ids and vectors of embedding tables between data ranks."""
    embedding_backward: float = 0.0
    """Seconds of exchanging their gradients."""
    activation_bytes: float = 0.0
    """Activations that a plan with offload stores until backward, of a block that does not recompute. For
    other layers: logits and the tensors that they are computed from, which stay on the device."""
    recomputed_activation_bytes: float = 0.0
    """Activations that a plan with offload stores until backward, of a block that recomputes."""


class CostAccumulator:
    """Accumulator of the operators of one layer.

    Args:
        chip: device that runs them.
        plan: plan with the precision of the layer, and the kind of device.
        fuses_pointwise: True if the operators between the products are fused.
        trains_matrices: True if the products' weights are trained.
    """

    def __init__(
        self, chip: DeviceModel, plan: Plan, *, fuses_pointwise: bool, trains_matrices: bool
    ) -> None:
        self.chip, self.trains_matrices = chip, trains_matrices
        self.precision_scale = ELEMENT_BYTES[plan.precision] / 2
        self.is_eager_on_cpu = plan.device == "cpu" and not fuses_pointwise
        self.forward = self.backward_input = self.backward_weight = self.recompute = 0.0
        self.kernels = [0, 0, 0]

    def add_matmul(
        self, m: float, n: float, k: float, precision: str, *, count: int = 1, is_recomputed: bool = False
    ) -> None:
        forward = matmul_seconds(self.chip, m, n, k, precision, count)
        self.forward += forward
        self.backward_input += matmul_seconds(self.chip, m, k, n, precision, count)
        if self.trains_matrices:
            self.backward_weight += matmul_seconds(self.chip, k, n, m, precision, count)
        launches = 1
        if ELEMENT_BYTES[precision] < 2:  # operands are scaled and cast, along both of their sides
            casts = memory_bound_seconds(self.chip, count * m * k * (2 + 2 * ELEMENT_BYTES[precision]))
            self.forward += casts
            forward += casts
            self.backward_input += memory_bound_seconds(
                self.chip, count * m * n * (2 + 2 * ELEMENT_BYTES[precision])
            )
            launches = 2
        self.recompute += forward if is_recomputed else 0.0
        self.add_kernels(launches, 2 * launches, launches if is_recomputed else 0)

    def add_memory_bound(
        self,
        elements: float,
        forward: float,
        backward: float,
        kernels: int = 1,
        *,
        is_recomputed: bool = False,
    ) -> None:
        """Add a memory-bound operator of `forward` and `backward` bytes per element in 16 bits."""
        elements *= self.precision_scale
        seconds = memory_bound_seconds(self.chip, elements * forward, kernels)
        self.forward += seconds
        self.backward_input += memory_bound_seconds(self.chip, elements * backward, kernels)
        self.recompute += seconds if is_recomputed else 0.0
        self.add_kernels(kernels, kernels, kernels if is_recomputed else 0)

    def add_gradient_sums(self, elements: float, tensors: int) -> None:
        """Add, to backward, the sums of the gradients of a tensor that `tensors` + 1 operators read."""
        seconds = memory_bound_seconds(self.chip, tensors * elements * self.precision_scale * 6.0, tensors)
        self.backward_input += seconds
        self.add_kernels(0, tensors, 0)

    def add_attention(self, forward: float, backward: float, kernels: int, *, is_recomputed: bool) -> None:
        self.forward += forward
        self.backward_input += backward
        self.recompute += forward if is_recomputed else 0.0
        self.add_kernels(kernels, kernels, kernels if is_recomputed else 0)

    def add_kernels(self, *kernels: int) -> None:
        """Add the numbers of kernels that the host launches in forward, in backward, and in recompute."""
        self.kernels = [count + added for count, added in zip(self.kernels, kernels, strict=True)]

    def layer_cost(self) -> LayerCost:
        return LayerCost(
            self.forward, self.backward_input, self.backward_weight, self.recompute, *self.kernels
        )
