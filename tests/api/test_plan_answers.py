"""Findings of `wanma plan`, as text for people and as JSON for programs."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

import wanma.planner.presentation.plan_analysis as study_module
from support.studies import FP8, PLANS, answers, study
from wanma.api.plan_report.html_page import report_html, write_page, write_trace
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.errors import WanmaError
from wanma.job.file.loading import to_job
from wanma.job.forecast.forecast import Forecast, Goodput, RunCost, StepTime
from wanma.job.plan.placement import ReplicaPlacement, StagePlacement
from wanma.job.plan.plan import Plan
from wanma.planner.forecast.problem import PlanningInputs
from wanma.planner.plan_search import search_plans
from wanma.planner.presentation.formatting import (
    TIME_KINDS,
    energy_text,
    evenly_spread_indices,
    goodput_text,
    mesh_text,
    settings_text,
    share_lines,
    step_seconds_text,
    throughput_text,
    time_shares,
)
from wanma.planner.presentation.json_output import analysis_json
from wanma.planner.presentation.plan_analysis import PlanAnalysis
from wanma.planner.presentation.step_breakdown import BAR_WIDTH, step_table, time_bar
from wanma.planner.presentation.terminal_tables import UNSUPPORTED_PLANS_TITLE, render_analysis
from wanma.planner.presentation.what_if_table import what_if_rows
from wanma.planner.search.result import SearchResult


def shown(content: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---------------------------------------------------------------- words


def test_every_kind_of_a_step_has_a_name() -> None:
    kinds = set(StepTime.__dataclass_fields__) - {"seconds", "uncertainty"}
    assert {kind.field for kind in TIME_KINDS} == kinds
    assert len({kind.glyph for kind in TIME_KINDS}) == len(TIME_KINDS)


def test_a_plan_in_words_names_sizes_above_one_and_what_is_unusual() -> None:
    plan = Plan(
        pp=4,
        dp_shard=8,
        tp=2,
        sequence_parallel=True,
        shard="optimizer",
        micro_batch=2,
        schedule="interleaved_1f1b",
        virtual_stages=3,
        recompute="selective",
        recompute_share=0.5,
        compile=True,
    )
    assert mesh_text(plan) == "pp 4 × dp_shard 8 × tp 2"
    assert settings_text(plan) == (
        "optimizer sharded, micro-batch 2, interleaved_1f1b × 3, selective recompute of 50%, compiled"
    )
    assert mesh_text(Plan()) == "one rank"


def test_unlike_replicas_are_told_with_their_devices_and_shares() -> None:
    fast = ReplicaPlacement(2, (StagePlacement(0, 20, 8), StagePlacement(1, 12, 4)))
    slow = ReplicaPlacement(1, (StagePlacement(1, 32, 4),))
    plan = Plan(pp=2, dp_replicate=3, tp=8, batch_shares=(4, 4, 2), placement=(fast, slow))
    cluster = parse_shorthand("2x8 H100 SXM + 3x4 A100 SXM 80GB, 4x100G")
    assert share_lines(plan, cluster) == [
        "2 replicas, 80% of the batch: 20 blocks on 8 × H100 SXM → 12 blocks on 4 × A100 SXM 80 GB",
        "1 replica, 20% of the batch: 32 blocks on 4 × A100 SXM 80 GB",
    ]
    assert mesh_text(plan) == "2 × (8, 4) + 1 × (4)"
    assert settings_text(plan) == "different replicas"
    assert share_lines(Plan(dp_replicate=3, batch_shares=(2, 1, 1)), cluster) == [
        "1 data rank: 50.00% of the batch each",
        "2 data ranks: 25.00% of the batch each",
    ]
    assert share_lines(Plan(), cluster) == []


def test_the_shares_of_data_ranks_are_told_with_the_kind_of_their_node() -> None:
    cluster = parse_shorthand("2x8 H100 SXM + 1x4 A100 SXM 80GB, 4x100G")
    plan = Plan(dp_replicate=6, tp=2, batch_shares=(2, 2, 2, 2, 1, 1))
    assert share_lines(plan, cluster) == [
        "4 data ranks on H100 SXM: 20.00% of the batch each",
        "2 data ranks on A100 SXM 80 GB: 10.00% of the batch each",
    ]


def test_neighbouring_stages_on_equal_devices_are_told_as_one() -> None:
    cluster = parse_shorthand("8x8 H100 SXM + 16x8 A100 SXM 40GB, 4x100G")
    equal = [StagePlacement(0, 5, 2) for _ in range(4)]
    unlike = [StagePlacement(1, blocks, 4) for blocks in (3, 4, 4, 1)]
    plan = Plan(
        pp=8, dp_replicate=8, tp=4, batch_shares=(1,) * 8, placement=(ReplicaPlacement(8, (*equal, *unlike)),)
    )
    assert share_lines(plan, cluster) == [
        "8 replicas, 100% of the batch: 4 stages of 5 blocks on 2 × H100 SXM → "
        "4 stages of 3 + 2 × 4 + 1 blocks on 4 × A100 SXM 40 GB"
    ]
    assert mesh_text(plan) == "8 × (4 × 2, 4 × 4)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (1234567.0, "1.23 M"), (12345.0, "12.3 k"), (3.2e9, "3.2 G"), (987.0, "987.0")],
)
def test_rates_have_three_digits(value: float | None, text: str) -> None:
    assert throughput_text(value) == text


def test_energy_is_told_in_kilowatt_hours() -> None:
    assert energy_text(415 * 3.6e6) == "415 kWh"
    assert energy_text(1287 * 3.6e9) == "1.29 GWh"
    assert energy_text(0.31 * 3.6e3) == "0.31 Wh"
    assert energy_text(999.7 * 3.6e6) == "1 MWh"
    assert energy_text(1.0) == "less than 0.01 Wh"
    assert energy_text(None) == "–"


@pytest.mark.parametrize(
    ("useful", "text"),
    [
        (
            Goodput(0.987, 0.0, 18_720.0, 243.4),
            "goodput 98.7 %: a failure every 5 h 12 min, 4 min 03 s lost each time",
        ),
        (Goodput(0.991, 0.009, 1e9, 10.0), "goodput 99.1 %: in-memory checkpoints take 0.9 %"),
        (
            Goodput(0.97, 0.01, 3600.0, 72.0),
            "goodput 97.0 %: a failure every 1 h 00 min, 1 min 12 s lost each time, "
            "in-memory checkpoints take 1.0 %",
        ),
        (Goodput(0.9996, 0.0, 1e7, 100.0), ""),
        (None, ""),
    ],
)
def test_what_of_a_run_is_useful_is_told_with_what_takes_the_rest(useful: Goodput | None, text: str) -> None:
    found = Forecast(1, 1, 1, 1, 1, step=StepTime(1.0, 1.0), run=RunCost(1e6, None, None, useful))
    assert goodput_text(found) == text
    lines = shown(step_table(found, None)).splitlines()
    assert "complete run: 11 d 13 h" in lines
    assert (text in lines) == bool(text)
    assert goodput_text(replace(found, run=None)) == ""


def test_a_step_is_told_with_its_doubt() -> None:
    assert step_seconds_text(StepTime(2.5, 2.5, uncertainty=0.117)) == "2.50 s ± 12%"
    assert step_seconds_text(None) == "–"


@given(st.integers(1, 500), st.integers(1, 40))
def test_spread_places_are_few_rising_and_hold_both_ends(count: int, most: int) -> None:
    places = evenly_spread_indices(count, most)
    assert len(places) == min(count, most)
    assert places == sorted(set(places))
    assert places[0] == 0
    assert most == 1 or places[-1] == count - 1


@given(
    st.lists(st.floats(0, 10), min_size=len(TIME_KINDS), max_size=len(TIME_KINDS)).filter(
        lambda kinds: sum(kinds) > 0.01
    )
)
def test_a_bar_is_as_wide_as_all_bars_and_its_kinds_as_their_shares(kinds: list[float]) -> None:
    fields = {kind.field: seconds for kind, seconds in zip(TIME_KINDS, kinds, strict=True)}
    step = StepTime(seconds=sum(kinds), **fields)
    bar = time_bar(step).plain
    assert len(bar) == BAR_WIDTH
    for kind, _, share in time_shares(step):
        assert abs(bar.count(kind.glyph) - BAR_WIDTH * share) <= 1


# ---------------------------------------------------------------- terminal


def test_the_terminal_shows_the_best_plans_with_where_their_time_goes() -> None:
    text = shown(render_analysis(answers()))
    best = study().best
    assert "1,234 plans searched in 0.25 s" in text
    assert "\n→1  " in text
    assert text.index("→1") < text.index(UNSUPPORTED_PLANS_TITLE) < text.index("unsupported: ")
    assert step_seconds_text(best.forecast.step) in text
    assert "unsupported: fp8 is <not> allowed" in text
    assert "█ compute" in text
    assert "Pareto front" in text


def test_the_jobs_own_plan_is_told_beside_the_best() -> None:
    one = answers(3)
    text = shown(render_analysis(one))
    assert one.study.best_comparison.verdict == "slower"
    assert f"The job's own plan\n{one.study.best_comparison.headline}\n" in text
    assert "recompute full instead of none" in " ".join(text.split())


def test_answers_follow_their_questions() -> None:
    text = shown(render_analysis(answers()))
    assert "Why not tp=2?" in text
    assert "Why not tp=3?\nparallel.tp = 3 " in text
    assert "does not fit: a rank needs" in text
    assert "What if" in text
    assert "the model does not fit" in text
    assert "Scaling over device counts" in text
    assert "gpus=20: nodes have 8 devices each" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_window(width: int) -> None:
    text = shown(render_analysis(answers(3)), width)
    assert max(map(len, text.splitlines())) <= width


def test_a_narrow_window_keeps_plan_and_step() -> None:
    best = study().best
    narrow = shown(render_analysis(PlanAnalysis(study())), 50)
    assert step_seconds_text(best.forecast.step) in narrow
    assert mesh_text(best.plan) in narrow
    after = narrow[narrow.index("Best plans") :]
    assert "MFU" not in after
    assert "step time by kind" not in after


def test_what_if_is_told_side_by_side_with_the_change_of_the_step() -> None:
    one = answers()
    heads, *rows = what_if_rows(one.study, one.what_if_answers)
    assert heads == ["", "now", "gpus=16", "memory=1GB"]
    table = {row[0]: row[1:] for row in rows}
    before, after = one.study.plan_result.forecast, one.what_if_answers[0].study
    change = after.plan_result.forecast.step.seconds / before.step.seconds - 1
    assert table["step"][1].endswith(f"({change:+.0%})")
    assert table["plan"][2] == "the model does not fit"
    assert table["step"][2] == "–"


def test_the_best_plans_of_a_what_if_are_searched_only_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[str] = []

    def find(inputs: PlanningInputs, **options: Any) -> SearchResult:
        searched.append(str(inputs.cluster))
        return search_plans(inputs, **options)

    monkeypatch.setattr(study_module, "search_plans", find)
    fixed = to_job(
        {
            "model": {"family": "decoder", "layers": 2, "hidden": 256, "heads": 4},
            "data": {"text": ["stdlib"], "sequence_length": 256},
            "train": {"global_batch": 16, "precision": "bf16"},
            "parallel": {"dp_replicate": 8},
        }
    )
    found = study_module.analyze_plan(
        fixed, cluster="1x8 H100", questions=study_module.Questions(what_ifs=["link.inter_node=8x400G"])
    )
    shown(render_analysis(found))
    shown(render_analysis(found))
    assert len(searched) == 1  # what the job's own plan is set beside
    assert analysis_json(found)["what_if"][0]["outcome"]["search"]["considered"] > 0
    assert len(searched) == 2


# ---------------------------------------------------------------- JSON


def test_json_holds_what_was_found_and_is_json() -> None:
    one = answers(3)
    told = json.loads(json.dumps(analysis_json(one), allow_nan=False))
    assert Plan.from_json(told["plan"]) == PLANS[3]
    assert told["forecast"]["step"]["seconds"] == pytest.approx(one.study.plan_result.forecast.step.seconds)  # type: ignore[union-attr]  # there is one
    assert told["search"]["considered"] == 1234
    assert [Plan.from_json(each["plan"]) for each in told["search"]["candidates"]] == [
        each.plan
        for each in one.study.search_result.candidates  # type: ignore[union-attr]  # there is one
    ]
    assert {each["forecast_only"] for each in told["search"]["candidates"]} == {None, "fp8 is <not> allowed"}
    assert told["beside_best"]["verdict"] == "slower"
    assert [each["asked"] for each in told["why"]] == ["tp=2", "dp_replicate=8", "tp=3"]
    assert told["why"][1]["answer"]["ways"][0]["saved_bytes"] > 0
    assert told["what_if"][1] == {
        "changes": "memory=1GB",
        "outcome": None,
        "reason": "the model does not fit",
    }
    assert [each["devices"] for each in told["scale"]] == [8, 16, 20]


# ---------------------------------------------------------------- page


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order."""

    VOID = frozenset({"meta", "br", "rect", "path", "circle", "polyline", "polygon"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:  # a rectangle with a title inside
            return
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_the_network_for_nothing() -> None:
    page = report_html(answers(3), "Plan of <gpt>")
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert parser.seen.count("figure") == 4  # a step, memory against time, throughput, efficiency
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page)
    assert "Plan of &lt;gpt&gt;" in page
    assert "fp8 is &lt;not&gt; allowed" in page


def test_the_page_shows_every_plan_answer_and_point() -> None:
    one = answers(3)
    page = report_html(one, "gpt")
    for candidate in one.study.search_result.candidates:
        assert step_seconds_text(candidate.forecast.step) in page
    assert page.count('<td class="share">') == len(PLANS) + 1
    assert "Why not tp=2?" in page
    assert "the model does not fit" in page
    assert "gpus=20: nodes have 8 devices each" in page
    assert '<tr class="ours">' in page


def test_the_picture_of_a_step_has_a_row_for_each_pipeline_rank() -> None:
    page = report_html(answers(3), "gpt")
    picture = page[page.index("Timeline of one step") :]
    picture = picture[: picture.index("</figure>")]
    assert ">stage 0</text>" in picture
    assert ">stage 1</text>" in picture
    assert "forward 0 of stage 0" in picture
    assert "optimizer" in picture


def test_a_job_without_a_forecast_of_time_has_a_page_that_says_why(tmp_path: Path) -> None:
    from dataclasses import replace

    one = study()
    assert one.plan_result.forecast is not None
    untimed = replace(
        one,
        run_search=None,
        time_unavailable_reason="nobody measured <this>",
        plan_result=replace(one.plan_result, forecast=replace(one.plan_result.forecast, step=None)),
    )
    page = report_html(PlanAnalysis(untimed), "gpt")
    assert "nobody measured &lt;this&gt;" in page
    assert "nobody measured <this>" in shown(render_analysis(PlanAnalysis(untimed)))
    with pytest.raises(WanmaError, match="no step time forecast: nobody measured"):
        write_trace(PlanAnalysis(untimed), tmp_path / "step.json")


# ---------------------------------------------------------------- files


def test_page_and_trace_are_files(tmp_path: Path) -> None:
    one = answers()
    write_page(one, tmp_path / "plan.html", "gpt")
    write_trace(one, tmp_path / "step.json")
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace["otherData"]["step_seconds"] == one.timeline.seconds


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match=r"cannot write .*nowhere"):
        write_page(PlanAnalysis(study()), tmp_path / "nowhere" / "plan.html", "gpt")


def test_fp8_is_told_in_the_plans_words() -> None:
    assert settings_text(FP8).endswith("fp8")


def test_bf16_is_told_where_it_was_chosen_and_not_where_the_job_says_it() -> None:
    plan = Plan(precision="bf16", approximate=("bf16",))
    assert settings_text(plan) == "micro-batch 1, bf16"
    assert settings_text(replace(plan, approximate=())) == "micro-batch 1"
