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
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from wanma.job.errors import JobError, WanmaError
from wanma.models.huggingface.module_replacement import (
    ATTENTION_IMPLEMENTATION,
    MASK_KEYWORD,
    attention_forward,
)
from wanma.models.huggingface.position_lookups import (
    PositionLookupTracer,
    first_position,
    max_sequence_length,
)
from wanma.models.huggingface.token_lookups import reads_tokens
from wanma.models.layers.experts import MixtureOfExperts
from wanma.torch_internals.dispatch import TorchDispatchMode, tree_leaves


@dataclass(frozen=True)
class ProbeResult:
    """Findings of a probe of one model."""

    mask_difference: str | None = None
    """Difference between transformers' attention mask and the causal one; None: they are equal."""
    attention_window: int | None = None
    """Longest sequence, in tokens, that every layer's attention sees completely; None: the data's."""
    is_causal: bool = True
    """True if no layer's attention sees later tokens."""
    first_position: int = 0
    """First position number that the model uses if it is given no positions."""
    max_sequence_length: int | None = None
    """Longest sequence, in tokens, for whose positions the model has weights; None: the data's."""
    random_draw: str | None = None
    """First random draw of a training step that no layout could repeat; None: there is none."""
    first_stage_modules: tuple[str, ...] = ()
    """Modules with parameters that are called before the blocks."""
    last_stage_modules: tuple[str, ...] = ()
    """Modules with parameters that are called after the blocks."""
    block_output_count: int | None = None
    """Length of the tuple that a block returns, hidden states first; None: it returns these alone."""
    split_obstacle: str | None = None
    """Reason why the model cannot be cut between blocks; None: it can."""
    reads_tokens: bool = False
    """True if the forward looks tokens up outside the input embedding: it then needs tokens."""


def probe(model: PreTrainedModel, blocks: str, sequence_length: int, *, keyed_dropout: bool) -> ProbeResult:
    """Run `model`, which is on the meta device, on a sequence of that length.

    Args:
        model: the transformers model.
        blocks: path of the list of blocks.
        sequence_length: in tokens.
        keyed_dropout: dropout modules draw by sample and are no finding.

    Raises:
        JobError: its forward fails.
    """
    requires_grad_before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    modes = {module: module.training for module in model.modules()}
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    try:
        for mixture in mixtures:
            mixture.forward = _identity_experts  # type: ignore[method-assign]  # theirs sorts tokens by their values
        model.requires_grad_(False)
        masks = _MaskProbe(sequence_length)
        default, shifted = (
            PositionLookupTracer(4 * sequence_length),
            PositionLookupTracer(4 * sequence_length),
        )
        model.eval()
        with _replaced_attention(model, attention_forward):
            is_token_lookup = reads_tokens(model, sequence_length, **{MASK_KEYWORD: None})
        with _replaced_attention(model, masks.attend, masks.mask), default:
            _run_masked(model, sequence_length, reads_tokens=is_token_lookup)
        model.train()
        for module in model.modules() if keyed_dropout else ():
            if isinstance(module, nn.Dropout):
                module.eval()
        draws, order = _RandomDrawProbe(), _CallOrderProbe(model, blocks)
        if is_token_lookup:
            order.split_obstacle = "it looks up tokens in more modules than its embedding"
        with _replaced_attention(model, draws.attend), order.record_calls(), draws, shifted:
            positions = torch.arange(sequence_length, device="meta").unsqueeze(0)
            try:
                order.evaluate(
                    *_run(model, sequence_length, reads_tokens=is_token_lookup, position_ids=positions)
                )
            except Exception:  # a random number may decide to skip a block
                if draws.first_draw is None:
                    raise
    except WanmaError:
        raise
    except Exception as error:  # whatever a family's forward raises
        line = str(error).strip().partition("\n")[0][:200]
        raise JobError(
            f"model.huggingface: the shape analysis of {type(model).__name__} (forward without data) failed: "
            f"{type(error).__name__}: {line}",
            "pass the model as model.factory: it supports data parallelism (dp_replicate, dp_shard)",
        ) from error
    finally:
        for mixture in mixtures:
            del mixture.forward
        for parameter, requires_grad in requires_grad_before.items():
            parameter.requires_grad_(requires_grad)
        for module, training in modes.items():
            module.training = training
    return ProbeResult(
        mask_difference=masks.difference,
        attention_window=masks.attention_window,
        first_position=first_position(default, shifted),
        max_sequence_length=max_sequence_length(default),
        is_causal=masks.is_causal,
        random_draw=draws.first_draw,
        first_stage_modules=_outermost(order.first_stage_modules),
        last_stage_modules=_outermost(order.last_stage_modules),
        block_output_count=order.block_output_count,
        split_obstacle=order.split_obstacle,
        reads_tokens=is_token_lookup,
    )


def _identity_experts(x: Tensor) -> Tensor:
    return x * 1.0


def _outermost(paths: list[str]) -> tuple[str, ...]:
    """Drop paths that lie within another path."""
    return tuple(path for path in paths if not any(path.startswith(f"{ancestor}.") for ancestor in paths))


def _run_masked(model: PreTrainedModel, sequence_length: int, *, reads_tokens: bool) -> None:
    """Run the forward with a mask of ones, or without a mask if that fails.

    Some families look for documents in positions unless there is a mask, others for padding in a mask: at
    values, which the meta device does not have.
    """
    mask = torch.ones(1, sequence_length, dtype=torch.bool, device="meta")
    try:
        _run(model, sequence_length, reads_tokens=reads_tokens, attention_mask=mask)
    except (RuntimeError, NotImplementedError) as first:
        try:
            _run(model, sequence_length, reads_tokens=reads_tokens)
        except (RuntimeError, NotImplementedError):
            raise first from None


def _run(
    model: PreTrainedModel, sequence_length: int, *, reads_tokens: bool, **keywords: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the forward; return the embeddings that went in, and the logits."""
    tokens = torch.zeros(1, sequence_length, dtype=torch.int64, device="meta")
    table = model.get_input_embeddings()
    embeddings: list[Tensor] = []

    def cut(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:  # noqa: ARG001  # a hook's
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0].clone()

    hook = table.register_forward_hook(cut)
    try:
        inputs = {"input_ids": tokens} if reads_tokens else {"inputs_embeds": table(tokens)}
        output = model(**inputs, use_cache=False, **keywords, **{MASK_KEYWORD: None})
    finally:
        hook.remove()
    return embeddings[0], output.logits


@contextmanager
def _replaced_attention(
    model: PreTrainedModel, function: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Let a model call `function` instead of `attend`, and `mask` to build its masks."""
    configs = {
        id(c): c for m in model.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)
    }
    implementations = {key: config._attn_implementation for key, config in configs.items()}
    AttentionInterface.register(_PROBED_ATTENTION, function)
    if mask is not None:
        AttentionMaskInterface.register(_PROBED_ATTENTION, mask)
    try:
        for config in configs.values():
            config._attn_implementation = _PROBED_ATTENTION
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = implementations[key]
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_PROBED_ATTENTION, None)


_PROBED_ATTENTION = f"{ATTENTION_IMPLEMENTATION}-probed"


class _MaskProbe:
    """Comparison of transformers' attention masks with the causal mask."""

    def __init__(self, sequence_length: int) -> None:
        self._length = sequence_length
        self._recorded_masks: dict[int, tuple[Tensor, _MaskVisibility]] = {}
        self.difference: str | None = None
        self.attention_window: int | None = None
        self.is_causal = True

    def mask(self, *, mask_function: Callable[..., Any], device: Any = None, **_: Any) -> Tensor:
        """Record the mask function and return a tensor that stands for the mask."""
        placeholder = torch.empty(1, 1, self._length, self._length, dtype=torch.bool, device=device)
        self._recorded_masks[id(placeholder)] = placeholder, _evaluate_mask(mask_function, self._length)
        return placeholder

    def attend(self, module: nn.Module, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        query, key, value, mask = (*arguments, *(keywords.pop("attention_mask", None),))[:4]
        if mask is None:
            is_causal = keywords.get("is_causal")
            if is_causal is None:
                is_causal = getattr(module, "is_causal", True)
            visible = _MaskVisibility(sees_later_tokens=not is_causal, window=None)
        elif id(mask) in self._recorded_masks:
            visible, mask = self._recorded_masks[id(mask)][1], None
        else:
            visible = _MaskVisibility(
                sees_later_tokens=False, window=None
            )  # `attend` rejects a mask of its own
        if visible.sees_later_tokens:
            self.is_causal = False
            self.difference = f"{type(module).__name__} attends to later tokens"
        if visible.window is not None:
            self.attention_window = min(visible.window, self.attention_window or visible.window)
            self.difference = self.difference or (
                f"{type(module).__name__} attends to {visible.window} of {self._length} tokens"
            )
        keywords.pop("is_causal", None)
        return attention_forward(module, query, key, value, mask, **keywords)


@dataclass(frozen=True)
class _MaskVisibility:
    """Difference of a mask from the causal one."""

    sees_later_tokens: bool
    """True if later tokens are seen."""
    window: int | None
    """Longest sequence of which every position sees all earlier ones; None: the given one."""


def _evaluate_mask(mask_function: Callable[..., Any], length: int) -> _MaskVisibility:
    """Evaluate some rows of a mask, among them those that reveal windows, chunks and prefixes."""
    rows = sorted({0, 1, length // 2, length - 2, length - 1} & set(range(length)))
    query = torch.tensor(rows, device="cpu").reshape(1, 1, -1, 1)
    key = torch.arange(length, device="cpu").reshape(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
    allowed = torch.as_tensor(mask_function(zero, zero, query, key), device="cpu").expand(
        1, 1, len(rows), length
    )[0, 0]
    causal = key[0, 0] <= query[0, 0]
    sees_later = bool((allowed & ~causal).any())
    if bool((allowed | ~causal).all()):
        return _MaskVisibility(sees_later, None)
    all_queries = torch.arange(length, device="cpu").reshape(1, 1, -1, 1)
    sees_first = torch.as_tensor(mask_function(zero, zero, all_queries, zero), device="cpu").expand(
        1, 1, length, 1
    )
    blind = (~sees_first.flatten()).nonzero()
    return _MaskVisibility(sees_later, int(blind[0]) if len(blind) else 1)


class _RandomDrawProbe(TorchDispatchMode):
    """Dispatch mode that finds operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.first_draw: str | None = None

    def attend(self, module: nn.Module, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        """Record dropout of attention weights as a draw, and call `attend`."""
        if keywords.pop("dropout", 0.0) > 0:
            self.first_draw = self.first_draw or f"dropout of {type(module).__name__}'s weights"
        return attention_forward(module, *arguments, **keywords)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.first_draw = self.first_draw or str(func.overloadpacket).removeprefix("aten.")
        return func(*args, **(kwargs or {}))


@dataclass
class _CallOrderProbe:
    """Order in which the modules of a model are called, and the tensors that pass from block to block."""

    model: PreTrainedModel
    blocks: str
    first_stage_modules: list[str] = field(default_factory=list)
    last_stage_modules: list[str] = field(default_factory=list)
    block_output_count: int | None = None
    split_obstacle: str | None = None
    _finished_blocks: int = 0
    _block_outputs: list[Tensor] = field(default_factory=list)
    """Hidden states that each block returned, detached from the graph that computed them."""
    _passed_tensor: Tensor | None = None
    """Tensor passed to the next block."""
    _called: set[str] = field(default_factory=set)

    @contextmanager
    def record_calls(self) -> Iterator[None]:
        container = self.model.get_submodule(self.blocks)
        with ExitStack() as stack:
            for number, block in enumerate(container.children()):
                pre_hook = block.register_forward_pre_hook(self._block_pre_hook(number), with_kwargs=True)
                hook = block.register_forward_hook(self._block_hook(number), with_kwargs=True)
                stack.callback(pre_hook.remove)
                stack.callback(hook.remove)
            for path, module in self._outer_modules():
                stack.callback(module.register_forward_pre_hook(self._outer_hook(path)).remove)
            yield

    def evaluate(self, embedded: Tensor, logits: Tensor) -> None:
        """Evaluate the order at the end of the forward."""
        count = len(list(self.model.get_submodule(self.blocks).children()))
        if self._finished_blocks != count:
            self._set_obstacle(
                f"only {self._finished_blocks} of its {count} blocks are called once and in order"
            )
        elif _depends_on(logits, [embedded, *self._block_outputs[:-1]]):
            self._set_obstacle("the modules after its blocks use more than the output of the last block")
        uncalled = [path for path, _ in self._outer_modules() if path not in self._called]
        if uncalled:
            self._set_obstacle(
                f"its parameters of {uncalled[0] or 'the model itself'} are used outside their module"
            )

    def _set_obstacle(self, reason: str) -> None:
        self.split_obstacle = self.split_obstacle or reason

    def _outer_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in self.model.named_modules():
            if not path.startswith(f"{self.blocks}.") and any(True for _ in module.parameters(recurse=False)):
                yield path, module

    def _outer_hook(self, path: str) -> Callable[..., None]:
        def note(module: nn.Module, arguments: Any) -> None:  # noqa: ARG001  # a hook's
            self._called.add(path)
            if self.blocks.startswith(f"{path}." if path else ""):
                self._set_obstacle(
                    f"{path or 'the model itself'} has parameters in the container of its blocks"
                )
                return
            count = len(list(self.model.get_submodule(self.blocks).children()))
            if self._finished_blocks == 0:
                self.first_stage_modules.append(path)
                is_embedding = isinstance(module, nn.Embedding)
                if not is_embedding and any(p.ndim > 1 for p in module.parameters(recurse=False)):
                    # Later stages run it on their inputs, whose width is that of the blocks.
                    self._set_obstacle(f"{path} changes the hidden size before its blocks")
            elif self._finished_blocks == count:
                self.last_stage_modules.append(path)
            else:
                self._set_obstacle(f"{path} is called between its blocks")

        return note

    def _block_pre_hook(self, block_index: int) -> Callable[..., None]:
        def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            hidden, other_inputs = _split_block_inputs(module, arguments, keywords)
            if block_index != self._finished_blocks:
                self._set_obstacle(f"block {block_index} is not called exactly once and in order")
            elif self._passed_tensor is not None and hidden is not self._passed_tensor:
                self._set_obstacle(
                    f"its model computes between block {block_index - 1} and block {block_index}"
                )
            elif any(
                isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(other_inputs)
            ):
                self._set_obstacle(
                    f"block {block_index} uses more than hidden states of the modules before the blocks"
                )

        return note

    def _block_hook(self, block_index: int) -> Callable[..., Any]:
        def cut(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
            is_tuple = isinstance(output, tuple)
            hidden = output[0] if is_tuple else output
            block_input, _ = _split_block_inputs(module, arguments, keywords)
            if not isinstance(hidden, Tensor) or block_input is None or hidden.shape != block_input.shape:
                self._set_obstacle(f"block {block_index} returns more than hidden states")
                self._finished_blocks += 1
                return None
            if _depends_on(hidden, self._block_outputs[:-1]):
                self._set_obstacle(f"block {block_index} uses more than hidden states of earlier blocks")
            self.block_output_count = len(output) if is_tuple else None
            self._block_outputs.append(hidden.detach().requires_grad_())
            self._passed_tensor = self._block_outputs[
                -1
            ].clone()  # a clone may be changed in place, as a leaf may not
            self._finished_blocks += 1
            return (self._passed_tensor, *output[1:]) if is_tuple else self._passed_tensor

        return cut


def _split_block_inputs(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Tensor | None, Any]:
    """Split a block's inputs into its hidden states and all others."""
    if arguments:
        return arguments[0], (arguments[1:], keywords)
    name = hidden_states_argument(module)
    return keywords.get(name), {key: value for key, value in keywords.items() if key != name}


def hidden_states_argument(block: nn.Module) -> str:
    """Return the name of the argument that takes the hidden states: the first one after `self`."""
    return list(inspect.signature(type(block).forward).parameters)[1]


def _depends_on(output: Tensor, inputs: list[Tensor]) -> bool:
    """Return True if autograd finds a path from `output` to one of `inputs`."""
    if not inputs or not output.requires_grad:
        return False
    # Later calls need the graph again.
    gradients = torch.autograd.grad(
        output, inputs, torch.empty_like(output), retain_graph=True, allow_unused=True
    )
    return any(gradient is not None for gradient in gradients)
