"""Comparison of what modules define in the user's program and in its ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.mutation_guard import install_generation_tagging_init
from torch.nn import functional

from wanma.job.errors import JobError
from wanma.training.checks.process_state import plain_state, process_state, refuse_other_process_state

SOURCE = """
import functools
import torch
import torch.nn.functional as F
from torch import nn

SCALE = 1.0
CONFIG = {"scale": 1.0}
CALLS = 0
MASKS = {}
SIZES = {}
UNUSED = 1

def traced(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

@traced
def scaled(x):
    global CALLS
    CALLS += 1
    MASKS[len(x)] = x > 0
    SIZES[len(x)] = 1
    return SCALE * CONFIG["scale"] * torch.relu(x)

class Base(nn.Module):
    width = 4
    made = 0

    def forward(self, x):
        return scaled(self.linear(x))[:, :self.width] + F.silu(x)

class Net(Base):
    def __init__(self):
        super().__init__()
        Base.made += 1
        self.linear = nn.Linear(4, 4)
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "some_net.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("some_net")
    sys.modules.pop("some_net")


def import_again() -> ModuleType:
    """Import the module from its file, as a rank does."""
    sys.modules.pop("some_net")
    importlib.invalidate_caches()
    return importlib.import_module("some_net")


def edit_file(net: ModuleType) -> None:
    assert net.__file__ is not None
    Path(net.__file__).write_text(SOURCE.replace("+ F.silu(x)", "+ 2 * F.silu(x)"))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: setattr(net.Base, "forward", lambda self, x: self.linear(x)), "some_net.Base.forward"),
        (lambda net: setattr(net.Net, "forward", lambda self, x: self.linear(x)), "some_net.Net.forward"),
        (lambda net: setattr(net.Base, "width", 3), "some_net.Base.width"),
        (lambda net: setattr(net, "scaled", torch.tanh), "some_net.scaled"),
        (lambda net: setattr(net, "SCALE", 5.0), "some_net.SCALE"),
        (lambda net: net.CONFIG.update(scale=2.0), "some_net.CONFIG"),
        (edit_file, "some_net.Base.forward"),
    ],
    ids=["method", "new-method", "attribute", "function", "constant", "dict", "file"],
)
def test_a_change_of_a_module_is_named(net: ModuleType, change: Callable[[Any], None], name: str) -> None:
    model = net.Net()
    change(net)
    state = process_state([model])
    import_again()
    with pytest.raises(JobError, match=f"differ in .*{name}"):
        refuse_other_process_state(state, {})


@pytest.mark.parametrize(
    ("place", "attribute", "value"),
    [
        (torch, "relu", torch.tanh),
        (functional, "silu", lambda x: x),
        (functional, "linear", functional.gelu),
        (nn.Linear, "forward", lambda *args: args[1]),
        (nn.Module, "__call__", lambda *args: args[1]),
    ],
    ids=["builtin", "function", "other-of-library", "method", "base"],
)
def test_a_patch_of_a_library_is_named(
    net: ModuleType, monkeypatch: pytest.MonkeyPatch, place: Any, attribute: str, value: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(place, attribute, value)
        state = process_state([net.Net()])
    with pytest.raises(JobError, match=rf"differ in torch.*\.{attribute}"):
        refuse_other_process_state(state, {})


def test_what_one_library_adds_to_another_is_its_own(
    net: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "added_by_a_library", save_file, raising=False)
        state = process_state([net.Net()])
    assert any(name.startswith("torch.nn.modules.module:Module.added_by_a_library") for name in state)
    refuse_other_process_state(state, {})


def test_what_torch_makes_of_itself_once_it_has_compiled_is_its_own(
    net: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name in ("__init__", "__setstate__"):  # put back at the end
            patch.setattr(nn.Module, name, getattr(nn.Module, name))
        patch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
        install_generation_tagging_init()
        state = process_state([net.Net()])
    refuse_other_process_state(state, {})


def test_a_hook_on_all_modules_is_named(net: ModuleType) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *args: args[2])
    state = process_state([net.Net()])
    handle.remove()
    with pytest.raises(JobError, match="_global_forward_hooks"):
        refuse_other_process_state(state, {})


def test_a_module_that_a_function_imports_is_compared(
    net: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_numbers.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "some_loss.py").write_text(
        "def loss(y, targets):\n    from some_numbers import FACTOR\n    return FACTOR * (y - targets)\n"
    )
    for name in ("some_numbers", "some_loss"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    monkeypatch.setattr(sys.modules["some_numbers"], "FACTOR", 2.0)
    state = process_state([sys.modules["some_loss"].loss])
    del sys.modules["some_numbers"]
    with pytest.raises(JobError, match=r"differ in some_numbers\.FACTOR"):
        refuse_other_process_state(state, {})


def test_what_a_program_does_beside_the_code_of_its_objects_is_no_difference(net: ModuleType) -> None:
    model = net.Net()  # counts in the class, which no method reads
    torch.optim.AdamW(model.parameters())  # torch wraps `step` at the first
    model(torch.randn(3, 4))  # counts in the module, and fills its caches
    net.UNUSED = 2  # type: ignore[attr-defined]
    state = process_state([model, torch.optim.AdamW])
    assert {"some_net:Base.forward", "some_net:scaled", "some_net:SCALE"} < set(state)
    import_again()
    refuse_other_process_state(state, {})


def test_a_factory_that_the_job_names_is_compared_with_its_constructor(net: ModuleType) -> None:
    net.Net.__init__ = lambda *_: None  # type: ignore[attr-defined]
    state = process_state([], ["some_net:Net", "some_loss:loss"])
    import_again()
    with pytest.raises(JobError, match=r"some_net\.Net\.__init__"):
        refuse_other_process_state(state, {"model.factory": "some_net:Net"})


RATES = {"rate": 1.0}


class Schedule:
    def __init__(self) -> None:
        self.rate, self.history = 1.0, [0.0]

    def share(self, step: int) -> float:
        return self.rate * step

    def log(self) -> None:
        self.history.append(1.0)


def test_a_change_of_what_an_object_reads_is_a_change_of_it() -> None:
    schedule, values = Schedule(), {"rate": 1.0}
    readers = [lambda _: RATES["rate"], lambda _: values["rate"], schedule.share]
    changes = [
        lambda: RATES.update(rate=2.0),
        lambda: values.update(rate=2.0),
        lambda: setattr(schedule, "rate", 2.0),
    ]
    for reader, change in zip(readers, changes, strict=True):
        before = plain_state(reader)
        schedule.log()  # which the method does not read
        assert plain_state(reader) == before
        change()
        assert plain_state(reader) != before
