"""Probe of a transformers model: its forward on the meta device, observed for what its config does not say.

    findings = probe(model, sequence_length)

Nothing is computed and no memory is used. Two forwards run. In the first, transformers' masks are given as
functions of two positions, which are compared with the causal mask of wanma's attention. The second
runs as training does. It finds random draws, and the order of the model's modules: a pipeline may be cut
before and after every block only if one tensor is all that passes from block to block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from wanma.job.errors import JobError, WanmaError
from wanma.models.huggingface.module_replacement import ATTENTION, MASK, attend
from wanma.models.huggingface.position_lookups import Lookups, first_position, longest_sequence
from wanma.models.huggingface.token_lookups import reads_tokens
from wanma.models.layers.experts import MixtureOfExperts


@dataclass(frozen=True)
class Findings:
    """Findings of a probe of one model."""

    mask: str | None = None
    """Difference between transformers' attention mask and the causal one; None: they are equal."""
    window: int | None = None
    """Longest sequence, in tokens, that every layer's attention sees completely; None: the data's."""
    is_causal: bool = True
    """True if no layer's attention sees later tokens."""
    first_position: int = 0
    """First position number that the model uses if it is given no positions."""
    longest: int | None = None
    """Longest sequence, in tokens, for whose positions the model has weights; None: the data's."""
    draws: str | None = None
    """First random draw of a training step that no layout could repeat; None: there is none."""
    first: tuple[str, ...] = ()
    """Modules with parameters that are called before the blocks."""
    last: tuple[str, ...] = ()
    """Modules with parameters that are called after the blocks."""
    outputs: int | None = None
    """Length of the tuple that a block returns, hidden states first; None: it returns these alone."""
    indivisible: str | None = None
    """Reason why the model cannot be cut between blocks; None: it can."""
    reads_tokens: bool = False
    """True if the forward looks tokens up outside the input embedding: it then needs tokens."""


def probe(model: PreTrainedModel, blocks: str, sequence_length: int, *, keyed_dropout: bool) -> Findings:
    """Run `model`, which is on the meta device, on a sequence of that length.

    Args:
        model: the transformers model.
        blocks: path of the list of blocks.
        sequence_length: in tokens.
        keyed_dropout: dropout modules draw by sample and are no finding.

    Raises:
        JobError: its forward fails.
    """
    were = {parameter: parameter.requires_grad for parameter in model.parameters()}
    modes = {module: module.training for module in model.modules()}
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    try:
        for mixture in mixtures:
            mixture.forward = _alike  # type: ignore[method-assign]  # theirs sorts tokens by their values
        model.requires_grad_(False)
        masks = _Masks(sequence_length)
        default, given = Lookups(4 * sequence_length), Lookups(4 * sequence_length)
        model.eval()
        with _attention(model, attend):
            by_tokens = reads_tokens(model, sequence_length, **{MASK: None})
        with _attention(model, masks.attend, masks.mask), default:
            _run_masked(model, sequence_length, by_tokens=by_tokens)
        model.train()
        for module in model.modules() if keyed_dropout else ():
            if isinstance(module, nn.Dropout):
                module.eval()
        draws, order = _Draws(), _Order(model, blocks)
        if by_tokens:
            order.indivisible = "it looks tokens up in more than its embedding"
        with _attention(model, draws.attend), order.watching(), draws, given:
            positions = torch.arange(sequence_length, device="meta").unsqueeze(0)
            try:
                order.end(*_run(model, sequence_length, by_tokens=by_tokens, position_ids=positions))
            except Exception:  # a random number may decide to skip a block
                if draws.found is None:
                    raise
    except WanmaError:
        raise
    except Exception as error:  # whatever a family's forward raises
        line = str(error).strip().partition("\n")[0][:200]
        raise JobError(
            f"model.huggingface: {type(model).__name__} cannot be run without data: "
            f"{type(error).__name__}: {line}",
            "give the model as model.factory, which works with data-parallel axes",
        ) from error
    finally:
        for mixture in mixtures:
            del mixture.forward
        for parameter, requires_grad in were.items():
            parameter.requires_grad_(requires_grad)
        for module, training in modes.items():
            module.training = training
    return Findings(
        mask=masks.difference,
        window=masks.window,
        first_position=first_position(default, given),
        longest=longest_sequence(default),
        is_causal=masks.is_causal,
        draws=draws.found,
        first=_outermost(order.first),
        last=_outermost(order.last),
        outputs=order.outputs,
        indivisible=order.indivisible,
        reads_tokens=by_tokens,
    )


def _alike(x: Tensor) -> Tensor:
    return x * 1.0


def _outermost(paths: list[str]) -> tuple[str, ...]:
    """Drop paths that lie within another path."""
    return tuple(path for path in paths if not any(path.startswith(f"{other}.") for other in paths))


def _run_masked(model: PreTrainedModel, sequence_length: int, *, by_tokens: bool) -> None:
    """Run the forward with a mask of ones, or without a mask if that fails.

    Some families look for documents in positions unless there is a mask, others for padding in a mask: at
    values, which the meta device does not have.
    """
    whole = torch.ones(1, sequence_length, dtype=torch.bool, device="meta")
    try:
        _run(model, sequence_length, by_tokens=by_tokens, attention_mask=whole)
    except (RuntimeError, NotImplementedError) as first:
        try:
            _run(model, sequence_length, by_tokens=by_tokens)
        except (RuntimeError, NotImplementedError):
            raise first from None


def _run(
    model: PreTrainedModel, sequence_length: int, *, by_tokens: bool, **keywords: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the forward; return the embeddings that went in, and the logits."""
    tokens = torch.zeros(1, sequence_length, dtype=torch.int64, device="meta")
    table = model.get_input_embeddings()
    made: list[Tensor] = []

    def cut(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:  # noqa: ARG001  # a hook's
        made.append(output.detach().requires_grad_())
        return made[0].clone()

    hook = table.register_forward_hook(cut)
    try:
        given = {"input_ids": tokens} if by_tokens else {"inputs_embeds": table(tokens)}
        output = model(**given, use_cache=False, **keywords, **{MASK: None})
    finally:
        hook.remove()
    return made[0], output.logits


@contextmanager
def _attention(
    model: PreTrainedModel, function: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Let a model call `function` instead of `attend`, and `mask` to build its masks."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    were = {key: config._attn_implementation for key, config in configs.items()}
    AttentionInterface.register(_PROBED, function)
    if mask is not None:
        AttentionMaskInterface.register(_PROBED, mask)
    try:
        for config in configs.values():
            config._attn_implementation = _PROBED
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = were[key]
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_PROBED, None)


_PROBED = f"{ATTENTION}-probed"


class _Masks:
    """Comparison of transformers' attention masks with the causal mask."""

    def __init__(self, sequence_length: int) -> None:
        self._length = sequence_length
        self._seen: dict[int, tuple[Tensor, _Visible]] = {}
        self.difference: str | None = None
        self.window: int | None = None
        self.is_causal = True

    def mask(self, *, mask_function: Callable[..., Any], device: Any = None, **_: Any) -> Tensor:
        """Record the mask function and return a tensor that stands for the mask."""
        stands = torch.empty(1, 1, self._length, self._length, dtype=torch.bool, device=device)
        self._seen[id(stands)] = stands, _visible(mask_function, self._length)
        return stands

    def attend(self, module: nn.Module, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        query, key, value, mask = (*arguments, *(keywords.pop("attention_mask", None),))[:4]
        if mask is None:
            is_causal = keywords.get("is_causal")
            if is_causal is None:
                is_causal = getattr(module, "is_causal", True)
            visible = _Visible(ahead=not is_causal, window=None)
        elif id(mask) in self._seen:
            visible, mask = self._seen[id(mask)][1], None
        else:
            visible = _Visible(ahead=False, window=None)  # `attend` rejects a mask of its own
        if visible.ahead:
            self.is_causal = False
            self.difference = f"{type(module).__name__} sees later tokens"
        if visible.window is not None:
            self.window = min(visible.window, self.window or visible.window)
            self.difference = self.difference or (
                f"{type(module).__name__} sees {visible.window} tokens of {self._length}"
            )
        keywords.pop("is_causal", None)
        return attend(module, query, key, value, mask, **keywords)


@dataclass(frozen=True)
class _Visible:
    """Difference of a mask from the causal one."""

    ahead: bool
    """True if later tokens are seen."""
    window: int | None
    """Longest sequence of which every position sees all earlier ones; None: the given one."""


def _visible(mask_function: Callable[..., Any], length: int) -> _Visible:
    """Evaluate some rows of a mask, among them those that reveal windows, chunks and prefixes."""
    rows = sorted({0, 1, length // 2, length - 2, length - 1} & set(range(length)))
    query = torch.tensor(rows, device="cpu").reshape(1, 1, -1, 1)
    key = torch.arange(length, device="cpu").reshape(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
    allowed = torch.as_tensor(mask_function(zero, zero, query, key), device="cpu").expand(
        1, 1, len(rows), length
    )[0, 0]
    causal = key[0, 0] <= query[0, 0]
    ahead = bool((allowed & ~causal).any())
    if bool((allowed | ~causal).all()):
        return _Visible(ahead, None)
    every = torch.arange(length, device="cpu").reshape(1, 1, -1, 1)
    sees_first = torch.as_tensor(mask_function(zero, zero, every, zero), device="cpu").expand(1, 1, length, 1)
    blind = (~sees_first.flatten()).nonzero()
    return _Visible(ahead, int(blind[0]) if len(blind) else 1)


class _Draws(TorchDispatchMode):
    """Dispatch mode that finds operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.found: str | None = None

    def attend(self, module: nn.Module, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        """Record dropout of attention weights as a draw, and call `attend`."""
        if keywords.pop("dropout", 0.0) > 0:
            self.found = self.found or f"dropout of {type(module).__name__}'s weights"
        return attend(module, *arguments, **keywords)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found = self.found or str(func.overloadpacket).removeprefix("aten.")
        return func(*args, **(kwargs or {}))


@dataclass
class _Order:
    """Order in which the modules of a model are called, and the tensors that pass from block to block."""

    model: PreTrainedModel
    blocks: str
    first: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    outputs: int | None = None
    indivisible: str | None = None
    _done: int = 0
    _leaves: list[Tensor] = field(default_factory=list)
    """Hidden states that each block returned, detached from the graph that computed them."""
    _handed: Tensor | None = None
    """Tensor passed to the next block."""
    _called: set[str] = field(default_factory=set)

    @contextmanager
    def watching(self) -> Iterator[None]:
        container = self.model.get_submodule(self.blocks)
        with ExitStack() as stack:
            for number, block in enumerate(container.children()):
                before = block.register_forward_pre_hook(self._before(number), with_kwargs=True)
                after = block.register_forward_hook(self._after(number), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            for path, module in self._outside():
                stack.callback(module.register_forward_pre_hook(self._outer(path)).remove)
            yield

    def end(self, embedded: Tensor, logits: Tensor) -> None:
        """Evaluate the order at the end of the forward."""
        count = len(list(self.model.get_submodule(self.blocks).children()))
        if self._done != count:
            self._reason(f"{self._done} of its {count} blocks are called, each once and in their order")
        elif _depends(logits, [embedded, *self._leaves[:-1]]):
            self._reason("what comes after its blocks takes more than the last one's output")
        uncalled = [path for path, _ in self._outside() if path not in self._called]
        if uncalled:
            self._reason(
                f"its parameters of {uncalled[0] or 'the model itself'} are used outside of a module"
            )

    def _reason(self, reason: str) -> None:
        self.indivisible = self.indivisible or reason

    def _outside(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in self.model.named_modules():
            if not path.startswith(f"{self.blocks}.") and any(True for _ in module.parameters(recurse=False)):
                yield path, module

    def _outer(self, path: str) -> Callable[..., None]:
        def note(module: nn.Module, arguments: Any) -> None:  # noqa: ARG001  # a hook's
            self._called.add(path)
            if self.blocks.startswith(f"{path}." if path else ""):
                self._reason(f"{path or 'the model itself'} has parameters beside its blocks")
                return
            count = len(list(self.model.get_submodule(self.blocks).children()))
            if self._done == 0:
                self.first.append(path)
                is_table = isinstance(module, nn.Embedding)
                if not is_table and any(p.ndim > 1 for p in module.parameters(recurse=False)):
                    # Later stages run it on their inputs, whose width is that of the blocks.
                    self._reason(f"{path} changes the width of embeddings before its blocks")
            elif self._done == count:
                self.last.append(path)
            else:
                self._reason(f"{path} is called between its blocks")

        return note

    def _before(self, number: int) -> Callable[..., None]:
        def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            hidden, others = _split(module, arguments, keywords)
            if number != self._done:
                self._reason(f"block {number} is not called once and in its order")
            elif self._handed is not None and hidden is not self._handed:
                self._reason(f"something is computed between block {number - 1} and block {number}")
            elif any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(others)):
                self._reason(f"block {number} takes more of what comes before it than hidden states")

        return note

    def _after(self, number: int) -> Callable[..., Any]:
        def cut(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
            is_tuple = isinstance(output, tuple)
            hidden = output[0] if is_tuple else output
            given, _ = _split(module, arguments, keywords)
            if not isinstance(hidden, Tensor) or given is None or hidden.shape != given.shape:
                self._reason(f"block {number} does not return hidden states alone")
                self._done += 1
                return None
            if _depends(hidden, self._leaves[:-1]):
                self._reason(f"block {number} takes more of earlier blocks than hidden states")
            self.outputs = len(output) if is_tuple else None
            self._leaves.append(hidden.detach().requires_grad_())
            self._handed = self._leaves[-1].clone()  # a clone may be changed in place, as a leaf may not
            self._done += 1
            return (self._handed, *output[1:]) if is_tuple else self._handed

        return cut


def _split(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Tensor | None, Any]:
    """Split a block's inputs into its hidden states and all others."""
    if arguments:
        return arguments[0], (arguments[1:], keywords)
    name = hidden_name(module)
    return keywords.get(name), {key: value for key, value in keywords.items() if key != name}


def hidden_name(block: nn.Module) -> str:
    """Return the name of the argument that takes the hidden states: the first one after `self`."""
    return list(inspect.signature(type(block).forward).parameters)[1]


def _depends(output: Tensor, inputs: list[Tensor]) -> bool:
    """Return True if autograd finds a path from `output` to one of `inputs`."""
    if not inputs or not output.requires_grad:
        return False
    # Later calls need the graph again.
    found = torch.autograd.grad(
        output, inputs, torch.empty_like(output), retain_graph=True, allow_unused=True
    )
    return any(gradient is not None for gradient in found)
