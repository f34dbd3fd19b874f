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
from torch.utils._pytree import tree_leaves

from wanma.job.errors import WanmaError
from wanma.job.forecast.forecast import Layer, Workload
from wanma.job.forecast.operators import Operator
from wanma.models.keyed_random.dropout import keyed_samples, replace_dropout
from wanma.models.layers.batch_norm import GroupedBatchNorm
from wanma.models.structure.repeated_blocks import repeated_blocks
from wanma.models.workload.fake_tensors import without_storage
from wanma.models.workload.operator_fusion import operators_by_unit
from wanma.models.workload.operator_trace import Scale, Trace, storage_of


@dataclass(frozen=True)
class Reading:
    """Options of a trace."""

    blocks: Collection[str] | None = ()
    """Names of its repeated blocks; None: found by structure (`repeated_blocks`)."""
    precision: torch.dtype | None = None
    """Dtype to which parameters and floating-point inputs are cast; None: unchanged."""
    autocast: bool = False
    """True if the forward runs under autocast to that precision, as users' modules do."""
    frozen: Callable[[str], bool] | None = None
    """Predicate of a parameter's name: True if the job freezes it; None: as `requires_grad` says."""


def measure(
    module: nn.Module | Callable[[], nn.Module],
    example_inputs: Sequence[Tensor],
    keywords: Mapping[str, Tensor],
    targets_per_sample: int,
    reading: Reading,
) -> Workload:
    """Return the workload of `module_workload`; see there.

    The tensors pretend to be on the CPU rather than on the meta device, because there attention is
    one fused operator, as on a GPU, and does not save its scores.
    """
    name = type(module).__name__ if isinstance(module, nn.Module) else "the module"
    try:
        with without_storage():
            shadow = _without_storage(module) if isinstance(module, nn.Module) else module()
            name = type(shadow).__name__
            run = _Run(shadow, (*example_inputs, *keywords.values()), reading)
            outputs = run.forward(example_inputs, keywords)
            run.backward(outputs)
    except WanmaError:
        raise
    except Exception as error:  # whatever its code raises
        raise WanmaError(
            f"cannot measure {name} without running it: {type(error).__name__}: {error}",
            "its forward must take the example inputs, in any number of samples (dim 0), and must not depend "
            "on the values of tensors; without a measurement a plan has no forecast",
        ) from error
    lines = tuple(_merge(run.lines(), name))
    numbers = sum(math.prod(tensor.shape[1:]) for tensor in example_inputs if tensor.is_floating_point())
    return Workload(
        lines,
        targets_per_sample,
        run.outputs_per_sample,
        run.samples_together,
        float(numbers) if numbers else None,
    )


class _Run:
    """Forward and backward of a module whose tensors have no storage. Inside a fake mode."""

    def __init__(self, shadow: nn.Module, examples: Sequence[Tensor], reading: Reading) -> None:
        replace_dropout(shadow)
        self.shadow, self.reading = shadow.train(), reading
        for name, parameter in shadow.named_parameters():
            if reading.precision is not None and parameter.is_floating_point():
                parameter.data = torch.empty_like(parameter, dtype=reading.precision)
            if reading.frozen is not None and reading.frozen(name):
                parameter.requires_grad_(False)
        grouped = [part for part in shadow.modules() if isinstance(part, GroupedBatchNorm)]
        self.samples_together = math.lcm(*(part.group for part in grouped))
        for part in grouped:
            part.register_forward_pre_hook(_one_group)
        self.scale = _scale(shadow, examples, reading)
        self.trace = Trace(self.scale)
        self.units = list(_units(shadow, _block_names(shadow, reading)))
        self.kept: defaultdict[str, float] = defaultdict(float)
        self.inputs: defaultdict[str, float] = defaultdict(float)
        # Tensors are kept alive so that no storage's identity is reused.
        self.saved: dict[int, Tensor] = {}
        self.own = {storage_of(tensor) for tensor in (*shadow.parameters(), *shadow.buffers())}
        self.outputs_per_sample = 0.0
        self._unit = ""
        for name, unit, _ in self.units:
            self._follow(name, unit)

    def forward(self, inputs: Sequence[Tensor], keywords: Mapping[str, Tensor]) -> list[Tensor]:
        """Run the forward; return its outputs that have a gradient."""
        given = [self._grown(tensor) for tensor in inputs]
        named = {key: self._grown(tensor) for key, tensor in keywords.items()}
        samples = torch.zeros(self.scale.samples, dtype=torch.int64)
        precision = self.reading.precision
        cast = (
            torch.autocast("cpu", dtype=precision)
            if self.reading.autocast and precision in (torch.bfloat16, torch.float16)
            else nullcontext()
        )
        saving = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._turn_to("")
        with (
            torch.enable_grad(),
            _without_mkldnn(),
            keyed_samples(self.shadow, 0, samples),
            cast,
            saving,
            self.trace,
        ):
            outputs = self.shadow(*given, **named)
        self._turn_to("")
        found = [
            leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        self.outputs_per_sample = sum(tensor.numel() for tensor in found) / self.scale.samples
        self._keep_outputs(found)
        return [tensor for tensor in found if tensor.requires_grad]

    def backward(self, outputs: list[Tensor]) -> None:
        if not outputs:
            return
        gradients = [torch.empty_like(tensor) for tensor in outputs]
        self.trace.backward = True
        with self.trace:
            torch.autograd.backward(outputs, gradients)

    def lines(self) -> list[_Line]:
        """Return the record of each unit, and last that of everything outside of them."""
        operators = operators_by_unit(self.trace.calls, {*self.saved, *self.own})
        costly: defaultdict[str, float] = defaultdict(float)
        for call in self.trace.calls:
            if call.is_kept:
                costly[call.unit] += sum(piece.per_sample for piece in call.writes)
        counted: set[int] = set()
        found = []
        sparse = _sparse_tables(self.shadow)
        for name, part, is_block in [*self.units, ("", self.shadow, False)]:
            # Parameters that an earlier line has counted are not counted again.
            new = {
                id(parameter): parameter for parameter in part.parameters() if id(parameter) not in counted
            }
            counted.update(new)
            trained = sum(p.numel() for key, p in new.items() if p.requires_grad and key not in sparse)
            found.append(
                _Line(
                    name,
                    type(part),
                    is_block,
                    sum(parameter.numel() for parameter in new.values()),
                    trained,
                    operators.get(name, ()),
                    self.kept[name],
                    self.inputs[name],
                    costly[name],
                )
            )
        return found

    def _grown(self, example: Tensor) -> Tensor:
        """Make a tensor like `example` with more rows, by the scale's prime."""
        precision = self.reading.precision
        dtype = precision if precision is not None and example.is_floating_point() else example.dtype
        shape = list(example.shape)
        if shape:
            shape[0] *= self.scale.prime
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _follow(self, name: str, unit: nn.Module) -> None:
        def enter(_: nn.Module, arguments: Any, keywords: Any) -> None:
            self._turn_to(name)
            self.inputs[name] += self._floating((arguments, keywords))

        unit.register_forward_pre_hook(enter, with_kwargs=True)
        unit.register_forward_hook(lambda *_: self._turn_to(""))

    def _turn_to(self, unit: str) -> None:
        self._unit = unit
        self.trace.turn_to(unit)

    def _keep(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor; further views of one storage, and parameters, add nothing.

        Neither does a tensor whose size does not depend on the samples, such as a table of positions.
        """
        storage, size = storage_of(tensor), tensor.untyped_storage().nbytes()
        if storage not in self.own and storage not in self.saved:
            self.saved[storage] = tensor
            if self.scale.grows(size):
                self.kept[self._unit] += size / self.scale.element_bytes / self.scale.samples
        return tensor

    def _keep_outputs(self, outputs: list[Tensor]) -> None:
        """Count the outputs, which the loss saves too, for the units that wrote them."""
        written = {piece.storage: call.unit for call in self.trace.calls for piece in call.writes}
        for tensor in outputs:
            self._unit = written.get(storage_of(tensor), "")
            self._keep(tensor)
        self._unit = ""

    def _floating(self, tree: Any) -> float:
        """Count the elements of all floating-point tensors in `tree`, of one sample."""
        leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves) / (
            self.scale.element_bytes * self.scale.samples
        )


@dataclass(frozen=True)
class _Line:
    """Record of one unit; elements are of one sample."""

    name: str
    kind: type[nn.Module]
    is_block: bool
    parameters: int
    trained_parameters: int
    operators: tuple[Operator, ...]
    kept_elements: float
    input_elements: float
    costly_elements: float

    @property
    def flops_per_sample(self) -> float:
        return sum(one.flops_per_sample for one in self.operators if one.phase == "forward")

    @property
    def is_layer(self) -> bool:
        """True if the unit has parameters, operators or saved elements."""
        return bool(self.parameters or self.operators or self.kept_elements)


def _merge(lines: list[_Line], whole: str) -> Iterator[Layer]:
    """Merge equal neighbours into one layer; the largest of their saved elements counts for each."""
    *units, outside = lines
    units = [unit for unit in units if unit.is_layer]

    def likeness(line: _Line) -> tuple[object, ...]:
        container = line.name.rpartition(".")[0]
        sizes = (line.parameters, line.trained_parameters, line.flops_per_sample)
        return container, line.kind, line.is_block, *sizes

    for (container, *_), group in groupby(units, key=likeness):
        same = list(group)
        first, last = same[0], same[-1]
        name = first.name
        if len(same) > 1:
            name = str(container) or f"{name}-{last.name}"
        # The last one is the most typical: the first may prepare what they share.
        yield _layer(last, name, len(same), max(line.kept_elements for line in same))
    if outside.is_layer:
        yield _layer(outside, whole, 1, outside.kept_elements)


def _layer(line: _Line, name: str, count: int, kept: float) -> Layer:
    is_frozen = line.parameters > 0 and line.trained_parameters == 0
    is_unreached = is_frozen and all(one.phase == "forward" for one in line.operators)
    return Layer(
        name,
        count,
        line.parameters,
        line.flops_per_sample,
        kept,
        line.input_elements,
        line.costly_elements,
        trained_parameters=None if line.trained_parameters == line.parameters else line.trained_parameters,
        unreached=count if is_unreached else 0,
        is_block=line.is_block,
        operators=line.operators,
    )


def _units(
    module: nn.Module, blocks: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield top-level children; containers of blocks, and those without a forward, are replaced by theirs.

    Yields:
        Name, module, and True if it is a block.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        holds = any(block.startswith(f"{path}.") for block in blocks)
        if path not in blocks and (holds or isinstance(child, (nn.ModuleList, nn.ModuleDict))):
            yield from _units(child, blocks, f"{path}.")
        else:
            yield path, child, path in blocks


def _block_names(shadow: nn.Module, reading: Reading) -> Collection[str]:
    if reading.blocks is not None:
        return reading.blocks
    found = {id(block) for block in repeated_blocks(shadow)}
    return {name for name, module in shadow.named_modules() if id(module) in found}


def _scale(shadow: nn.Module, examples: Sequence[Tensor], reading: Reading) -> Scale:
    tensors = [*shadow.parameters(), *shadow.buffers()]
    sizes = [size for tensor in tensors for size in tensor.shape]
    sizes += [size for tensor in examples for size in tensor.shape]
    floating = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    dtype = reading.precision or (floating.dtype if floating is not None else torch.float32)
    return Scale.beside(sizes, examples[0].shape[0], dtype.itemsize)


def _one_group(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    """Treat all traced samples as one group, so that its kernels are counted once."""
    assert isinstance(module, GroupedBatchNorm)
    module.group = arguments[0].shape[0]


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Disable MKL-DNN: recurrent layers are then single products instead of one operator for a whole layer.

    Not `torch.backends.mkldnn.flags`, which warns of settings of other devices.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _sparse_tables(shadow: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients are sparse."""
    return {
        id(module.weight)
        for module in shadow.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }


def _without_storage(module: nn.Module) -> nn.Module:
    """Copy a module with every tensor replaced by one of its shape; call it inside a fake mode."""
    copies: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        copies[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for part in module.modules():
        # Buffers, and tensors that a module holds as plain attributes.
        for tensor in tree_leaves([list(part.buffers(recurse=False)), _attributes(part)]):
            if isinstance(tensor, Tensor) and id(tensor) not in copies:
                copies[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.deepcopy(module, copies)


def _attributes(part: nn.Module) -> list[Any]:
    own = ("_parameters", "_buffers", "_modules")
    return [value for name, value in vars(part).items() if name not in own]
