"""Trace of a module's computation and saved tensors, by one forward and backward without storage."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from wanma.job.errors import WanmaError
from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.forecast.operators import Operator
from wanma.models.keyed_random.dropout import bind_samples, replace_dropout
from wanma.models.layers.batch_norm import GroupedBatchNorm
from wanma.models.structure.repeated_blocks import find_repeated_blocks
from wanma.models.workload.operator_fusion import group_operators
from wanma.models.workload.operator_trace import OperatorTrace, SampleScaling
from wanma.torch_internals.autograd import storage_id
from wanma.torch_internals.dispatch import tree_leaves
from wanma.torch_internals.fake_tensors import fake_tensor_mode
from wanma.torch_internals.modules import BUFFERS, CHILDREN, PARAMETERS
from wanma.torch_internals.operators import is_mkldnn_enabled, set_mkldnn_enabled


@dataclass(frozen=True)
class TraceOptions:
    """Options of a trace."""

    blocks: Collection[str] | None = ()
    """Names of its repeated blocks; None: found by structure (`find_repeated_blocks`)."""
    precision: torch.dtype | None = None
    """Dtype to which parameters and floating-point inputs are cast; None: unchanged."""
    autocast: bool = False
    """True if the forward runs under autocast to that precision, as users' modules do."""
    is_frozen: Callable[[str], bool] | None = None
    """Predicate of a parameter's name: True if the job freezes it; None: as `requires_grad` says."""


def trace_workload(
    module: nn.Module | Callable[[], nn.Module],
    example_inputs: Sequence[Tensor],
    keywords: Mapping[str, Tensor],
    targets_per_sample: int,
    options: TraceOptions,
) -> Workload:
    """Return the workload of `trace_module_workload`; see there.

    The tensors pretend to be on the CPU rather than on the meta device, because there attention is
    one fused operator, as on a GPU, and does not save its scores.
    """
    name = type(module).__name__ if isinstance(module, nn.Module) else "the module"
    try:
        with fake_tensor_mode():
            fake_module = _copy_without_storage(module) if isinstance(module, nn.Module) else module()
            name = type(fake_module).__name__
            run = _TracedRun(fake_module, (*example_inputs, *keywords.values()), options)
            outputs = run.forward(example_inputs, keywords)
            run.backward(outputs)
    except WanmaError:
        raise
    except Exception as error:  # whatever its code raises
        raise WanmaError(
            f"cannot trace {name} on fake tensors: {type(error).__name__}: {error}",
            "write a forward that accepts the example inputs with any number of samples (dim 0) and does not "
            "depend on values of tensors; otherwise plans have no forecast",
        ) from error
    lines = tuple(_merge_equal_modules(run.module_costs(), name))
    numbers = sum(math.prod(tensor.shape[1:]) for tensor in example_inputs if tensor.is_floating_point())
    return Workload(
        lines,
        targets_per_sample,
        run.outputs_per_sample,
        run.coupled_samples,
        float(numbers) if numbers else None,
    )


class _TracedRun:
    """Forward and backward of a module whose tensors have no storage. Inside a fake mode."""

    def __init__(self, module: nn.Module, examples: Sequence[Tensor], options: TraceOptions) -> None:
        replace_dropout(module)
        self.module, self.options = module.train(), options
        for name, parameter in module.named_parameters():
            if options.precision is not None and parameter.is_floating_point():
                parameter.data = torch.empty_like(parameter, dtype=options.precision)
            if options.is_frozen is not None and options.is_frozen(name):
                parameter.requires_grad_(False)
        grouped = [part for part in module.modules() if isinstance(part, GroupedBatchNorm)]
        self.coupled_samples = math.lcm(*(part.group_size for part in grouped))
        for part in grouped:
            part.register_forward_pre_hook(_set_single_group)
        self.scale = _choose_scaling(module, examples, options)
        self.trace = OperatorTrace(self.scale)
        self.traced_modules = list(_traced_modules(module, _block_names(module, options)))
        self.saved_elements: defaultdict[str, float] = defaultdict(float)
        self.input_elements: defaultdict[str, float] = defaultdict(float)
        # Tensors are kept alive so that no storage's identity is reused.
        self.saved_tensors: dict[int, Tensor] = {}
        self.own_storages = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self.outputs_per_sample = 0.0
        self._module_path = ""
        for name, unit, _ in self.traced_modules:
            self._register_hooks(name, unit)

    def forward(self, inputs: Sequence[Tensor], keywords: Mapping[str, Tensor]) -> list[Tensor]:
        """Run the forward; return its outputs that have a gradient."""
        positional = [self._scale_example(tensor) for tensor in inputs]
        keyword_tensors = {key: self._scale_example(tensor) for key, tensor in keywords.items()}
        samples = torch.zeros(self.scale.samples, dtype=torch.int64)
        precision = self.options.precision
        cast = (
            torch.autocast("cpu", dtype=precision)
            if self.options.autocast and precision in (torch.bfloat16, torch.float16)
            else nullcontext()
        )
        saving = torch.autograd.graph.saved_tensors_hooks(self._record_saved_tensor, lambda tensor: tensor)
        self._enter_module("")
        with (
            torch.enable_grad(),
            _without_mkldnn(),
            bind_samples(self.module, 0, samples),
            cast,
            saving,
            self.trace,
        ):
            outputs = self.module(*positional, **keyword_tensors)
        self._enter_module("")
        output_tensors = [
            leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        self.outputs_per_sample = sum(tensor.numel() for tensor in output_tensors) / self.scale.samples
        self._record_outputs(output_tensors)
        return [tensor for tensor in output_tensors if tensor.requires_grad]

    def backward(self, outputs: list[Tensor]) -> None:
        if not outputs:
            return
        gradients = [torch.empty_like(tensor) for tensor in outputs]
        self.trace.is_backward = True
        with self.trace:
            torch.autograd.backward(outputs, gradients)

    def module_costs(self) -> list[_ModuleCost]:
        """Return the record of each unit, and last that of everything outside of them."""
        operators = group_operators(self.trace.calls, {*self.saved_tensors, *self.own_storages})
        costly: defaultdict[str, float] = defaultdict(float)
        for call in self.trace.calls:
            if call.is_saved_by_selective_recompute:
                costly[call.module_path] += sum(piece.elements_per_sample for piece in call.writes)
        counted: set[int] = set()
        costs = []
        sparse = _sparse_gradient_parameters(self.module)
        for name, part, is_block in [*self.traced_modules, ("", self.module, False)]:
            # Parameters that an earlier line has counted are not counted again.
            new = {
                id(parameter): parameter for parameter in part.parameters() if id(parameter) not in counted
            }
            counted.update(new)
            trained = sum(p.numel() for key, p in new.items() if p.requires_grad and key not in sparse)
            costs.append(
                _ModuleCost(
                    name,
                    type(part),
                    is_block,
                    sum(parameter.numel() for parameter in new.values()),
                    trained,
                    operators.get(name, ()),
                    self.saved_elements[name],
                    self.input_elements[name],
                    costly[name],
                )
            )
        return costs

    def _scale_example(self, example: Tensor) -> Tensor:
        """Make a tensor like `example` with more rows, by the scale's prime."""
        precision = self.options.precision
        dtype = precision if precision is not None and example.is_floating_point() else example.dtype
        shape = list(example.shape)
        if shape:
            shape[0] *= self.scale.prime
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _register_hooks(self, name: str, unit: nn.Module) -> None:
        def enter(_: nn.Module, arguments: Any, keywords: Any) -> None:
            self._enter_module(name)
            self.input_elements[name] += self._floating_point_elements((arguments, keywords))

        unit.register_forward_pre_hook(enter, with_kwargs=True)
        unit.register_forward_hook(lambda *_: self._enter_module(""))

    def _enter_module(self, unit: str) -> None:
        self._module_path = unit
        self.trace.enter_module(unit)

    def _record_saved_tensor(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor; further views of one storage, and parameters, add nothing.

        Neither does a tensor whose size does not depend on the samples, such as a table of positions.
        """
        storage, size = storage_id(tensor), tensor.untyped_storage().nbytes()
        if storage not in self.own_storages and storage not in self.saved_tensors:
            self.saved_tensors[storage] = tensor
            if self.scale.scales_with_samples(size):
                self.saved_elements[self._module_path] += size / self.scale.element_bytes / self.scale.samples
        return tensor

    def _record_outputs(self, outputs: list[Tensor]) -> None:
        """Count the outputs, which the loss saves too, for the units that wrote them."""
        written = {piece.storage: call.module_path for call in self.trace.calls for piece in call.writes}
        for tensor in outputs:
            self._module_path = written.get(storage_id(tensor), "")
            self._record_saved_tensor(tensor)
        self._module_path = ""

    def _floating_point_elements(self, tree: Any) -> float:
        """Count the elements of all floating-point tensors in `tree`, of one sample."""
        leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves) / (
            self.scale.element_bytes * self.scale.samples
        )


@dataclass(frozen=True)
class _ModuleCost:
    """Record of one unit; elements are of one sample."""

    name: str
    kind: type[nn.Module]
    is_block: bool
    parameters: int
    trained_parameters: int
    operators: tuple[Operator, ...]
    saved_elements: float
    input_elements: float
    selective_recompute_elements: float

    @property
    def flops_per_sample(self) -> float:
        return sum(operator.flops_per_sample for operator in self.operators if operator.phase == "forward")

    @property
    def is_layer(self) -> bool:
        """True if the unit has parameters, operators or saved elements."""
        return bool(self.parameters or self.operators or self.saved_elements)


def _merge_equal_modules(module_costs: list[_ModuleCost], model_name: str) -> Iterator[LayerWorkload]:
    """Merge equal neighbours into one layer; the largest of their saved elements counts for each."""
    *units, remainder = module_costs
    units = [unit for unit in units if unit.is_layer]

    def likeness(line: _ModuleCost) -> tuple[object, ...]:
        container = line.name.rpartition(".")[0]
        sizes = (line.parameters, line.trained_parameters, line.flops_per_sample)
        return container, line.kind, line.is_block, *sizes

    for (container, *_), group in groupby(units, key=likeness):
        equal_units = list(group)
        first, last = equal_units[0], equal_units[-1]
        name = first.name
        if len(equal_units) > 1:
            name = str(container) or f"{name}-{last.name}"
        # The last one is the most typical: the first may prepare what they share.
        yield _make_layer(last, name, len(equal_units), max(line.saved_elements for line in equal_units))
    if remainder.is_layer:
        yield _make_layer(remainder, model_name, 1, remainder.saved_elements)


def _make_layer(module_cost: _ModuleCost, name: str, count: int, saved_elements: float) -> LayerWorkload:
    is_frozen = module_cost.parameters > 0 and module_cost.trained_parameters == 0
    is_unreached = is_frozen and all(operator.phase == "forward" for operator in module_cost.operators)
    return LayerWorkload(
        name,
        count,
        module_cost.parameters,
        module_cost.flops_per_sample,
        saved_elements,
        module_cost.input_elements,
        module_cost.selective_recompute_elements,
        trainable_parameters=None
        if module_cost.trained_parameters == module_cost.parameters
        else module_cost.trained_parameters,
        layers_without_backward=count if is_unreached else 0,
        is_block=module_cost.is_block,
        operators=module_cost.operators,
    )


def _traced_modules(
    module: nn.Module, blocks: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield top-level children; containers of blocks, and those without a forward, are replaced by theirs.

    Yields:
        Name, module, and True if it is a block.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        contains_block = any(block.startswith(f"{path}.") for block in blocks)
        if path not in blocks and (contains_block or isinstance(child, (nn.ModuleList, nn.ModuleDict))):
            yield from _traced_modules(child, blocks, f"{path}.")
        else:
            yield path, child, path in blocks


def _block_names(fake_module: nn.Module, options: TraceOptions) -> Collection[str]:
    if options.blocks is not None:
        return options.blocks
    block_ids = {id(block) for block in find_repeated_blocks(fake_module)}
    return {name for name, module in fake_module.named_modules() if id(module) in block_ids}


def _choose_scaling(
    fake_module: nn.Module, examples: Sequence[Tensor], options: TraceOptions
) -> SampleScaling:
    tensors = [*fake_module.parameters(), *fake_module.buffers()]
    sizes = [size for tensor in tensors for size in tensor.shape]
    sizes += [size for tensor in examples for size in tensor.shape]
    floating = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    dtype = options.precision or (floating.dtype if floating is not None else torch.float32)
    return SampleScaling.choose(sizes, examples[0].shape[0], dtype.itemsize)


def _set_single_group(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    """Treat all traced samples as one group, so that its kernels are counted once."""
    assert isinstance(module, GroupedBatchNorm)
    module.group_size = arguments[0].shape[0]


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Disable MKL-DNN: recurrent layers are then single products, not one operator for a whole layer."""
    enabled = is_mkldnn_enabled()
    set_mkldnn_enabled(False)
    try:
        yield
    finally:
        set_mkldnn_enabled(enabled)


def _sparse_gradient_parameters(fake_module: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients are sparse."""
    return {
        id(module.weight)
        for module in fake_module.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }


def _copy_without_storage(module: nn.Module) -> nn.Module:
    """Copy a module with every tensor replaced by one of its shape; call it inside a fake mode."""
    copies: dict[int, Any] = {}
    for parameter in module.parameters():
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        copies[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
    for part in module.modules():
        # Buffers, and tensors that a module holds as plain attributes.
        for tensor in tree_leaves([list(part.buffers(recurse=False)), _attributes(part)]):
            if isinstance(tensor, Tensor) and id(tensor) not in copies:
                copies[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.deepcopy(module, copies)


def _attributes(part: nn.Module) -> list[Any]:
    return [value for name, value in vars(part).items() if name not in (PARAMETERS, BUFFERS, CHILDREN)]
