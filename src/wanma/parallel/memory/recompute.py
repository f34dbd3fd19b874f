"""Recompute (activation checkpointing): blocks keep few activations and run again in backward.

full        a block's inputs are kept, and all of it runs again (Chen et al. 2016)
selective   the results that cost most to compute again are kept too (`selective_recompute.py`): about half
            of the products and everything cheap runs again (Korthikanti et al. 2022, section 5)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.models.keyed_random.dropout import recompute_context_fn
from wanma.models.keyed_random.sample_context import SampleDependentModule
from wanma.models.structure.selective_recompute import SelectiveRecomputePolicy
from wanma.parallel.context.ring_attention import RING_ATTENTION_OPERATOR
from wanma.parallel.memory.recomputed_attributes import RecomputedAttributeCheck
from wanma.torch_internals.autograd import version_counter
from wanma.torch_internals.dispatch import active_dispatch_modes, pop_dispatch_mode, push_dispatch_mode
from wanma.torch_internals.modules import forward_hooks, registered_buffers
from wanma.torch_internals.recompute import SELECTIVE_RECOMPUTE_MODES, skip_side_effects_of_compiled_recompute

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of the first run of a block and of the second."""


def apply_recompute(blocks: list[nn.Module], plan: Plan) -> None:
    """Apply `plan.recompute` to a stage's blocks in place; parameter names stay as they are.

    A block's forward is replaced and no hook added, so that FSDP2's hooks stay outside of what runs again and
    torch.compile sees an operator that it knows.
    """
    if plan.compile and plan.recompute != "none":
        # Dropout counts its calls. A compiled block computes its masks once more, from the same keys.
        skip_side_effects_of_compiled_recompute()
    for index in plan.recomputed_blocks(len(blocks)):
        block = blocks[index]
        contexts = _recompute_contexts(block, is_selective=plan.recompute == "selective")
        block.forward = _with_recompute(block.forward, contexts, block)


def _with_recompute(
    forward: Callable[..., Any], contexts: Callable[[], _Contexts] | None, block: nn.Module
) -> Callable[..., Any]:
    name = type(block).__name__
    buffer_owners = [
        (path, module)
        for path, module in block.named_modules()
        if registered_buffers(module) and not type(module).__module__.startswith("wanma.")
    ]

    attributes = RecomputedAttributeCheck(block)

    # torch.compile takes a function here, but no functools.partial, and does not know torch's own default
    # where it comes as an argument.
    def run(*arguments: Any, **keywords: Any) -> Any:
        is_checked = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        input_versions = _versions(arguments) if is_checked else []
        buffers = _buffer_versions(buffer_owners) if is_checked else {}
        function = attributes.wrap_forward(forward) if is_checked else forward
        if contexts is None:
            output = checkpoint(function, *arguments, use_reentrant=False, **keywords)
        else:
            output = checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts, **keywords)
        if is_checked and _versions(arguments) != input_versions:
            raise JobError(
                f"{name} changes its input in place, so recompute in backward would start from the "
                "changed input",
                "build it with inplace=False, or set parallel.recompute = 'none'",
            )
        for path, version in _buffer_versions(buffer_owners).items() if is_checked else ():
            if buffers.get(path) != version:
                raise JobError(
                    f"{name} changes its buffer {path} in its forward pass, so recompute in backward "
                    "would change it twice",
                    "set parallel.recompute = 'none', or change the buffer between two steps (wanma.session)",
                )
        return output

    return run


def _versions(arguments: tuple[Any, ...]) -> list[int]:
    """Return the version counters of tensors, which count their changes in place."""
    return [version_counter(x) for x in arguments if isinstance(x, torch.Tensor)]


def _buffer_versions(modules: list[tuple[str, nn.Module]]) -> dict[str, tuple[int, int]]:
    """Return the identity and version counter of each buffer, by path."""
    return {
        f"{path}.{name}".lstrip("."): (id(buffer), version_counter(buffer))
        for path, module in modules
        for name, buffer in registered_buffers(module).items()
        if buffer is not None
    }


def _recompute_contexts(block: nn.Module, is_selective: bool) -> Callable[[], _Contexts] | None:
    """Return the function that makes the contexts of a block's two runs, which share its sample context.

    Returns:
        None where nothing is kept and no module depends on samples.
    """
    if not is_selective and not any(isinstance(module, SampleDependentModule) for module in block.modules()):
        return None
    keyed = recompute_context_fn(block)

    def contexts() -> _Contexts:
        if get_proxy_mode() is not None:
            # torch.compile wants nothing but modes that say what is kept. The second run is part of the
            # graph that it makes, and so are the samples that dropout was told.
            save_mode, recompute_mode = create_selective_checkpoint_contexts(
                _SaveCostlyPolicy(SelectiveRecomputePolicy() if is_selective else None)
            )
            return save_mode, recompute_mode
        forward_context, recompute_context = keyed()
        if not is_selective:
            return forward_context, recompute_context
        save_mode, recompute_mode = create_selective_checkpoint_contexts(
            _SaveCostlyPolicy(SelectiveRecomputePolicy())
        )
        return _nest(forward_context, save_mode), _nest(recompute_context, recompute_mode)

    return contexts


def exclude_hooks_from_recompute(module: nn.Module) -> None:
    """Exclude the hooks of modules inside a block, FSDP2's, from what is kept or runs again.

    torch 2.13 expects the same operators in the second run, and a sharded module that is gathered in the
    first may still be so in the second.
    """
    for hooks in forward_hooks(module):
        for key, hook in hooks.items():
            hooks[key] = _outside_selective_mode(hook)


def _outside_selective_mode(hook: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        modes = active_dispatch_modes()
        if not modes or not isinstance(modes[-1], SELECTIVE_RECOMPUTE_MODES):
            return hook(*arguments, **keywords)
        pop_dispatch_mode()
        try:
            return hook(*arguments, **keywords)
        finally:
            push_dispatch_mode(modes[-1])

    return run


class _SaveCostlyPolicy:
    """Policy of selective recompute: keep the results of costly operators, or none without a policy."""

    def __init__(self, policy: SelectiveRecomputePolicy | None) -> None:
        self._forward_policy = policy
        self._recompute_policy = SelectiveRecomputePolicy()
        """Counter for the second run, in which torch 2.11 asks again."""

    def __call__(self, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        policy = self._recompute_policy if context.is_recompute else self._forward_policy
        must_save = (
            self._forward_policy is not None
            and policy is not None
            and (policy.must_save(operator) or operator is RING_ATTENTION_OPERATOR)
        )
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _nest(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
