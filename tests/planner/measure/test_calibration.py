"""Records of measurements and runs: lookup, correction, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.machines import machine
from wanma.job.errors import WanmaError
from wanma.planner.hardware_model.calibration import (
    FACTOR_BOUNDS,
    BenchmarkPoint,
    Calibration,
    CorrectionFactors,
    DeviceCalibration,
    calibration_file,
    load_calibration,
    save_calibration,
)
from wanma.planner.hardware_model.collective_time import RankGroup, all_reduce_seconds
from wanma.planner.hardware_model.model import (
    AttentionCurve,
    FrameworkOverhead,
    HardwareModel,
    HostModel,
    LinkLevel,
)
from wanma.planner.hardware_model.operator_time import matmul_seconds, memory_bound_seconds

factors = st.floats(*FACTOR_BOUNDS)


def measured(
    device: str = "CPU", ranks: int = 2, threads: int = 1, dispatch: float = 1e-6
) -> DeviceCalibration:
    found = machine(8)
    chip = replace(found.chip, attention_in={"fp32": AttentionCurve(0.3, 100, 0.8)})
    links = (LinkLevel(ranks, 1e-5, 1e9, 4096.0),)
    points = (
        BenchmarkPoint("product", (8, 16, 32), 1e-5, "fp32"),
        BenchmarkPoint("all_reduce", (2, 4096), 2e-4),
    )
    return DeviceCalibration(
        device,
        ranks,
        threads,
        HardwareModel(
            chip, links, dispatch_seconds=dispatch, program=FrameworkOverhead(1e-5, 5e-3, 2e-3, 3e-3)
        ),
        "a host",
        "2026",
        points,
    )


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    kept = Calibration((measured(), measured("GPU", 8, 0)), {"GPU": CorrectionFactors(compute=1.25, runs=3)})
    path = save_calibration(kept, tmp_path / "deep" / "calibration.json")
    assert load_calibration(path) == kept


def test_where_nothing_was_kept_there_is_nothing(tmp_path: Path) -> None:
    assert load_calibration(tmp_path / "none.json") == Calibration()
    assert Calibration().find("CPU", 2, 1) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 0}', '{"version": 1, "measured": [{}]}'])
def test_a_damaged_file_is_refused_with_the_way_out(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(WanmaError, match="cannot be used") as refused:
        load_calibration(path)
    assert str(path) in refused.value.message
    assert "wanma bench machine --save" in refused.value.hint


def test_keys_of_another_version_are_refused(tmp_path: Path) -> None:
    value = Calibration((measured(),)).to_json()
    value["measured"][0]["machine"]["colour"] = "red"
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(value))
    with pytest.raises(WanmaError, match="unknown key colour"):
        load_calibration(path)


def test_a_file_without_a_program_is_loaded_without_one() -> None:
    value = json.loads(json.dumps(Calibration((measured(),)).to_json()))
    del value["measured"][0]["machine"]["program"]
    (older,) = Calibration.from_json(value).devices
    assert older.machine == replace(measured().machine, program=FrameworkOverhead())


def test_a_file_without_a_host_is_loaded_with_the_usual_one() -> None:
    found = measured()
    found = replace(
        found, machine=replace(found.machine, host=HostModel(link_bytes_per_second=7.0, doubt=0.0))
    )
    value = json.loads(json.dumps(Calibration((found,)).to_json()))
    assert Calibration.from_json(value).devices == (found,)
    del value["measured"][0]["machine"]["host"]
    (older,) = Calibration.from_json(value).devices
    assert older == replace(found, machine=replace(found.machine, host=HostModel()))


def test_it_is_kept_in_the_users_cache_folder() -> None:
    assert calibration_file({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/wanma/calibration.json")


def test_the_nearest_number_of_ranks_and_threads_is_found() -> None:
    kept = Calibration(tuple(measured(ranks=ranks, threads=threads) for ranks, threads in [(1, 4), (4, 1)]))
    assert kept.find("CPU", 1, 4) == measured(ranks=1, threads=4)
    assert kept.find("CPU", 8, 1) == measured(ranks=4, threads=1)
    assert kept.find("CPU", 2, 4) == measured(ranks=1, threads=4)
    assert kept.find("another", 1, 1) is None


def test_a_new_measurement_replaces_the_old_one_and_what_was_learned_beside_it() -> None:
    learned = {"CPU": CorrectionFactors(compute=2.0, runs=1), "GPU": CorrectionFactors(compute=0.5, runs=1)}
    kept = Calibration((measured(), measured("GPU", 8, 0)), learned)
    new = kept.with_devices(measured(dispatch=5e-6))
    assert new.find("CPU", 2, 1) == measured(dispatch=5e-6)
    assert len(new.devices) == 2
    assert new.corrections_for("CPU") == CorrectionFactors()
    assert new.corrections_for("GPU").compute == 0.5


def test_of_two_files_the_other_counts() -> None:
    mine = Calibration((measured(), measured("GPU", 8, 0)), {"CPU": CorrectionFactors(compute=2.0)})
    other = Calibration((measured(dispatch=5e-6),), {"CPU": CorrectionFactors(compute=3.0)})
    both = mine.merge(other)
    assert both.find("CPU", 2, 1) == measured(dispatch=5e-6)
    assert both.find("GPU", 8) == measured("GPU", 8, 0)
    assert both.corrections_for("CPU").compute == 3.0


@given(factors, factors)
def test_corrections_scale_what_they_name(compute: float, communication: float) -> None:
    found = measured().machine
    corrected = CorrectionFactors(compute=compute, communication=communication).apply(found)
    product = [matmul_seconds(m.chip, 4096, 4096, 4096, "bf16") for m in (found, corrected)]
    stream = [memory_bound_seconds(m.chip, 1e8, 3) for m in (found, corrected)]
    reduce = [all_reduce_seconds(m, RankGroup(2), 1e6) for m in (found, corrected)]
    assert product[1] == pytest.approx(compute * product[0])
    assert stream[1] == pytest.approx(compute * stream[0])
    assert reduce[1] == pytest.approx(communication * reduce[0])
    assert corrected.dispatch_seconds == pytest.approx(compute * found.dispatch_seconds)
    assert vars(corrected.program) == pytest.approx(
        {name: compute * seconds for name, seconds in vars(found.program).items()}
    )


@given(factors, factors)
def test_the_optimizer_has_a_factor_of_its_own(compute: float, optimizer: float) -> None:
    found = measured().machine
    corrected = CorrectionFactors(compute=compute, optimizer=optimizer).apply(found)
    update = [memory_bound_seconds(m.chip, 1e8, 3) * m.optimizer_factor for m in (found, corrected)]
    assert update[1] == pytest.approx(optimizer * update[0])


def test_corrections_beyond_their_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="compute = 5"):
        CorrectionFactors(compute=5.0)
