"""Devices that compute or remember wrongly are told from those that do not."""

from __future__ import annotations

import pickle

import pytest
import torch

from wanma.hardware.checks import device_check
from wanma.hardware.checks.device_check import (
    INNER_SIZE,
    PATTERN_PERIOD,
    CheckSize,
    build_factors,
    check_device,
    expected_product,
)
from wanma.job.errors import HealthCheckError

CPU = torch.device("cpu")
LITTLE = CheckSize(rows=2 * PATTERN_PERIOD, min_rounds=2, min_seconds=0.0, memory_bytes=1 << 16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [PATTERN_PERIOD, 5 * PATTERN_PERIOD])
def test_the_known_product_is_the_product_in_every_format(rows: int, dtype: torch.dtype) -> None:
    left, right = build_factors(rows, CPU, dtype)
    assert (left.shape, right.shape) == ((rows, INNER_SIZE), (INNER_SIZE, rows))
    assert sorted(left.unique().tolist()) == sorted(right.unique().tolist()) == [-1, 0, 1]
    exact = (left.double()[:, :, None] * right.double()[None]).sum(1)
    assert torch.equal(exact, expected_product(rows).double())
    assert torch.equal((left @ right).double(), exact), "whatever the order of its sums"
    assert exact.abs().max() <= 256
    assert len(exact.unique()) > 5, "a device that puts out one number is found out"


def test_a_device_that_is_well_passes_and_says_how_fast_it_is() -> None:
    found = check_device(CPU, LITTLE)
    assert (found.device, found.memory_bytes) == ("cpu", 1 << 16)
    assert found.flops_per_second > 1e6
    quickest = min(check_device(CPU).seconds for _ in range(5))
    assert 0 < quickest < 0.5, "as a run has it, on a machine that other tests may share"


def test_one_wrong_number_of_a_product_is_shown_beside_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = left @ right
        found[3, 7] += 1
        return found

    monkeypatch.setattr(device_check, "multiply", product)
    right = int(expected_product(32)[3, 7])
    with pytest.raises(HealthCheckError) as caught:
        check_device(CPU, LITTLE)
    assert caught.value.message == (
        "cpu: a matrix product with a known result was wrong (torch.float32, round 1): "
        f"1 of 1,024 values, first at [3, 7]: {float(right + 1)} instead of {float(right)}"
    )
    assert "cluster.health_check = 'never'" in caught.value.hint
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), HealthCheckError)


def test_a_later_round_counts_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([0, 1])
    monkeypatch.setattr(device_check, "multiply", lambda left, right: left @ right + next(rounds))
    with pytest.raises(HealthCheckError, match=r"round 2\): 1,024 of 1,024 values"):
        check_device(CPU, LITTLE)


@pytest.mark.parametrize(("bit", "pattern"), [(0, "0x5555555555555555"), (1, "0xaaaaaaaaaaaaaaaa")])
def test_a_bit_that_stays_0_is_found_by_the_pattern_that_sets_it(
    monkeypatch: pytest.MonkeyPatch, bit: int, pattern: str
) -> None:
    fill = torch.Tensor.fill_

    def stuck(block: torch.Tensor, value: int) -> torch.Tensor:
        fill(block, value)
        block[11] &= ~(1 << bit)
        return block

    monkeypatch.setattr(torch.Tensor, "fill_", stuck)
    with pytest.raises(HealthCheckError, match=rf"{pattern}: 1 of 8,192 .*\[11\]"):
        check_device(CPU, LITTLE)


def test_two_addresses_that_are_one_place_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = torch.Tensor.copy_

    def folded(block: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copy(block, source)
        block[5] = block[4101]
        return block

    monkeypatch.setattr(torch.Tensor, "copy_", folded)
    with pytest.raises(HealthCheckError, match=r"first at \[5\]: 4101 instead of 5"):
        check_device(CPU, LITTLE)
