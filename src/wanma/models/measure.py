"""What a module computes and keeps, counted in one forward on tensors that have shapes but no storage."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from wanma.job.errors import WanmaError
from wanma.job.forecast import Layer
from wanma.models.costly import Costly
from wanma.models.dropout import keyed_samples


def measure(
    module: nn.Module, example_inputs: Sequence[Tensor], opened: Sequence[str] = ()
) -> tuple[Layer, ...]:
    """The layers of `module_workload`; see there.

    The tensors pretend to be on the CPU rather than on the meta device, because there attention is
    one fused operator, as on a GPU, and does not keep its scores.
    """
    rows = example_inputs[0].shape[0]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        shadow = _without_storage(module).train()
        inputs = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in example_inputs]
        samples = torch.zeros(rows, dtype=torch.int64, device="cpu")
    units = list(_units(shadow, "", opened))
    ledger = _Ledger(shadow)
    for name, unit in units:
        ledger.follow(name, unit)
    hooks = torch.autograd.graph.saved_tensors_hooks(ledger.keep, lambda tensor: tensor)
    watch = _Watch(ledger)
    try:
        with mode, ledger.counter, torch.enable_grad(), keyed_samples(shadow, 0, samples), hooks, watch:
            shadow(*inputs)
    except Exception as error:
        raise WanmaError(
            f"cannot measure {type(module).__name__} without running it: {type(error).__name__}: {error}",
            "its forward must take the example inputs and must not depend on the values of tensors; "
            "without a measurement a plan has no forecast",
        ) from error
    ledger.turn_to("")
    named = [*units, ("", shadow)]
    return tuple(_merge([ledger.line(name, part, rows) for name, part in named], type(module).__name__))


@dataclass(frozen=True)
class _Line:
    name: str
    kind: type[nn.Module]
    parameters: int
    flops_per_sample: float
    elements_per_sample: float
    input_elements_per_sample: float
    costly_elements_per_sample: float


class _Ledger:
    """Books FLOPs and kept elements on the unit whose forward is running; "" is outside all units."""

    def __init__(self, shadow: nn.Module) -> None:
        self.counter = FlopCounterMode(display=False, custom_mapping=_attention_on_cpu())
        self._unit = ""
        self._booked = 0
        self._flops: defaultdict[str, int] = defaultdict(int)
        self._elements: defaultdict[str, int] = defaultdict(int)
        self._inputs: defaultdict[str, int] = defaultdict(int)
        self._costly: defaultdict[str, int] = defaultdict(int)
        self._judge = Costly()
        # Tensors are held so that no storage's identity is used twice.
        self._known: dict[int, Tensor] = {}
        self._counted: set[int] = set()
        for tensor in (*shadow.parameters(), *shadow.buffers()):
            self._known[_storage(tensor)] = tensor

    def follow(self, name: str, unit: nn.Module) -> None:
        def enter(_: nn.Module, arguments: Any, keywords: Any) -> None:
            self.turn_to(name)
            self._inputs[name] += _elements((arguments, keywords))

        unit.register_forward_pre_hook(enter, with_kwargs=True)
        unit.register_forward_hook(lambda *_: self.turn_to(""))

    def turn_to(self, name: str) -> None:
        total = self.counter.get_total_flops()
        self._flops[self._unit] += total - self._booked
        self._booked, self._unit = total, name
        self._judge = Costly()

    def run(self, operator: Any, result: Any) -> None:
        """Note what an operator has computed."""
        if self._judge.keeps(operator):
            self._costly[self._unit] += _elements(result)

    def keep(self, tensor: Tensor) -> Tensor:
        """Saved-tensor hook: several views of one storage, and parameters, keep nothing more."""
        if self._known.setdefault(_storage(tensor), tensor) is tensor:
            self._elements[self._unit] += tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    def line(self, name: str, part: nn.Module, rows: int) -> _Line:
        """A unit's line; parameters that an earlier line has counted are not counted again."""
        new = {id(parameter): parameter.numel() for parameter in part.parameters()}
        new = {key: size for key, size in new.items() if key not in self._counted}
        self._counted.update(new)
        return _Line(
            name,
            type(part),
            sum(new.values()),
            self._flops[name] / rows,
            self._elements[name] / rows,
            self._inputs[name] / rows,
            self._costly[name] / rows,
        )


class _Watch(TorchDispatchMode):
    """Tells the ledger of every operator."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._ledger.run(func, result)
        return result


def _units(module: nn.Module, prefix: str, opened: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Top-level children; `opened` ones and those without a forward of their own count as their children."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or path in opened:
            yield from _units(child, f"{path}.", opened)
        else:
            yield path, child


def _merge(lines: list[_Line], whole: str) -> Iterator[Layer]:
    """Equal neighbours become one layer; what the first of them keeps for all counts for each.

    What holds, computes and keeps nothing is no layer.
    """
    *units, outside = lines
    units = [unit for unit in units if _is_layer(unit)]

    def likeness(line: _Line) -> tuple[object, ...]:
        container = line.name.rpartition(".")[0]
        return container, line.kind, line.parameters, line.flops_per_sample

    for (container, *_), group in groupby(units, key=likeness):
        same = list(group)
        name = same[0].name
        if len(same) > 1:
            name = str(container) or f"{name}-{same[-1].name}"
        kept = max(line.elements_per_sample for line in same)
        inputs, costly = same[0].input_elements_per_sample, same[0].costly_elements_per_sample
        yield Layer(name, len(same), same[0].parameters, same[0].flops_per_sample, kept, inputs, costly)
    if _is_layer(outside):
        yield Layer(whole, 1, outside.parameters, outside.flops_per_sample, outside.elements_per_sample)


def _is_layer(line: _Line) -> bool:
    return bool(line.parameters or line.flops_per_sample or line.elements_per_sample)


def _without_storage(module: nn.Module) -> nn.Module:
    """A copy with every parameter and buffer replaced by one of its shape; call it inside a fake mode."""
    copies: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        copies[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in module.buffers():
        copies[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return copy.deepcopy(module, copies)


def _elements(tree: Any) -> int:
    """Of all floating-point tensors in it."""
    leaves = tree_leaves(tree)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _attention_on_cpu() -> dict[Any, Any]:
    """FLOPs of the one fused attention operator that torch's counter does not know."""

    def count(query: torch.Size, key: torch.Size, value: torch.Size, *options: Any, **_: Any) -> int:
        # Options are dropout, is_causal; torch leaves out what is at its default.
        rows, heads, queries, width = query
        products = rows * heads * queries * key[-2] * (width + value[-1])
        return products if len(options) > 1 and options[1] else 2 * products

    return {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count}
