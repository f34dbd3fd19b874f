"""Suite files: what is read, and what is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from wanma.bench.programs.places import place_contender
from wanma.bench.runner import duration_seconds
from wanma.bench.suites.scaled_contenders import THREADS
from wanma.bench.suites.suite_file import find_suite, is_suite, known_suites, parse_over
from wanma.bench.suites.suite_of_commands import suite_of_commands
from wanma.bench.suites.suite_of_job import DEFAULT_STEPS, read_suite_or_job
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.file.loading import load_job

SUITE = """
title = "Two sizes"
baseline = "small hidden=32"
target = "loss<=3"

[job.model]
preset = "gpt-1m"

[job.data]
text = ["{suite}/text.txt"]

[[contenders]]
name = "small"

[[contenders]]
name = "other"
command = ["{python}", "{suite}/other.py"]
patterns = {loss = "loss ([0-9.]+)"}

[over]
"model.hidden" = [32, 64]

[rule]
rounds = 2
budget = "1h30m"

[smoke]
steps = 1
contenders = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(SUITE)
    return path


def test_each_combination_is_a_contender(file: Path) -> None:
    suite, rule = read_suite_or_job(file)
    assert [contender.name for contender in suite.contenders] == [
        "small hidden=32", "small hidden=64", "other hidden=32", "other hidden=64",
    ]  # fmt: skip
    assert suite.contenders[1].overrides == ["model.hidden=64"]
    assert suite.contenders[2].command == ("{python}", "{suite}/other.py"), "places are filled in later"
    placed = place_contender(suite.contenders[2], suite.places)
    assert placed.command == (sys.executable, str(file.parent.resolve() / "other.py"))
    assert (rule.rounds, rule.budget_seconds) == (2, 5400.0)
    assert suite.target is not None
    assert 'preset = "gpt-1m"' in suite.job_text


def test_some_contenders_of_a_suite_are_measured(file: Path) -> None:
    suite, _ = read_suite_or_job(file, contenders=["small"])
    assert [contender.name for contender in suite.contenders] == ["small hidden=32", "small hidden=64"]
    with pytest.raises(WanmaError) as refused:
        read_suite_or_job(file, contenders=["large"])
    assert refused.value.hint == "its contenders: small, other"


def test_the_smoke_test_is_the_suite_in_small(file: Path) -> None:
    suite, rule = read_suite_or_job(file, is_smoke=True)
    assert [contender.name for contender in suite.contenders] == ["small hidden=32"]
    assert (rule.rounds, rule.steps) == (1, 1)


def test_the_digest_is_that_of_what_is_measured(file: Path) -> None:
    first, _ = read_suite_or_job(file)
    file.write_text(
        file.read_text().replace("Two sizes", "Another title").replace("rounds = 2", "rounds = 3")
    )
    same, _ = read_suite_or_job(file)
    assert first.digest == same.digest
    others = [
        read_suite_or_job(file, overrides=["train.seed=2"])[0],
        read_suite_or_job(file, steps=7)[0],
        read_suite_or_job(file, is_smoke=True)[0],
    ]
    (file.parent / "other.py").write_text("print('loss 1')")
    others.append(read_suite_or_job(file)[0])
    assert len({first.digest, *(other.digest for other in others)}) == 5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds = 2", "round = 2", r"rule\.round: unknown key\. Did you mean 'rounds'"),
        ('baseline = "small hidden=32"', 'baseline = "smal"', "there is no contender 'smal'"),
        ("loss<=3", "loss=3", "'loss=3' is not a target"),
        ('budget = "1h30m"', 'budget = "soon"', "'soon' is not a duration"),
        ("budget =", "buget =", r"rule\.buget: unknown key\. Did you mean 'budget'"),
        ("loss (", "loss ((", "the pattern of loss is wrong"),
        ('name = "other"', 'name = "small"', "two contenders are called small"),
    ],
)
def test_a_wrong_suite_is_refused_with_the_cause(file: Path, old: str, new: str, message: str) -> None:
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(WanmaError, match=message):
        read_suite_or_job(file)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"model.hidden" = [32, 64]', '"model.hiden" = [32]', ["'small hiden=32'", "model.hiden"]),
        ('name = "small"', 'name = "small"\nsettings = {"model.x" = 1}', ["'small hidden=32'", "model.x"]),
        ("/other.py", "/{train.steps}", ["'other hidden=ten'", "model.hidden"]),
    ],
)
def test_a_wrong_key_is_told_with_suite_and_contender(
    file: Path, old: str, new: str, named: list[str]
) -> None:
    text = file.read_text().replace(old, new)
    if "ten" in named[0]:  # of the command alone
        text = text.replace("[32, 64]", '["ten"]').replace('"small"', '"small"\ncommand = ["true"]', 1)
    file.write_text(text)
    with pytest.raises(JobError) as refused:
        read_suite_or_job(file, overrides=["train.seed=2"])
    assert all(word in refused.value.message for word in [str(file), *named])
    assert "command line" not in refused.value.message
    assert refused.value.exit_code == EXIT_USAGE


def test_a_wrong_key_of_the_job_is_told_with_the_file_that_has_it(file: Path) -> None:
    file.write_text(file.read_text().replace('preset = "gpt-1m"', "hiden = 3"))
    with pytest.raises(JobError, match=re.escape(f"{file}: unknown key 'model.hiden'")):
        read_suite_or_job(file)
    text = file.read_text().partition("[[contenders]]")
    file.write_text(f'job = "job.toml"\n{text[1]}{text[2]}')
    (file.parent / "job.toml").write_text("[model]\nhiden = 3\n")
    with pytest.raises(JobError, match=re.escape(f"{file.parent / 'job.toml'}: unknown key")):
        read_suite_or_job(file)


def test_a_job_may_be_yaml(tmp_path: Path) -> None:
    job = tmp_path / "mine.yaml"
    job.write_text("model:\n  preset: gpt-1m\ntrain:\n  betas: [0.9, 0.95]\n")
    (contender,) = (suite := read_suite_or_job(job)[0]).contenders
    assert contender.name == "job"
    (tmp_path / "job.toml").write_text(suite.job_text)
    assert load_job(tmp_path / "job.toml").train.betas == (0.9, 0.95)


def test_a_job_is_a_suite_of_one(tmp_path: Path) -> None:
    job = tmp_path / "mine.toml"
    job.write_text('[model]\npreset = "gpt-1m"\n\n[train]\nsteps = 500\n')
    suite, rule = read_suite_or_job(job, overrides=["train.seed=3"], over=["parallel.dp_replicate=1..4"])
    assert [contender.name for contender in suite.contenders] == [
        "dp_replicate=1", "dp_replicate=2", "dp_replicate=4",
    ]  # fmt: skip
    assert suite.contenders[0].overrides[:2] == ["train.seed=3", "parallel.dp_replicate=1"]
    assert rule.steps == DEFAULT_STEPS
    assert read_suite_or_job(job, target="loss<=1")[1].steps is None, "as many as the target takes"
    assert not is_suite(job)


def test_a_command_of_several_lines_has_a_name_of_one() -> None:
    suite, _ = suite_of_commands(
        [["python", "-c", "import time\nfor i in range(3):\n    print(i)"]], patterns={}
    )
    (contender,) = suite.contenders
    assert contender.name == "python -c 'import time for i in range(3): print(i)'"
    assert contender.command[-1].count("\n") == 2


def test_a_suite_has_one_digest_wherever_it_lies(file: Path, tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / file.name).write_text(file.read_text())
    for folder in (file.parent, clone):
        (folder / "other.py").write_text("print('loss 1')")
    suites = [read_suite_or_job(path)[0] for path in (file, clone / file.name)]
    assert suites[0].digest == suites[1].digest


def test_the_title_of_commands_names_them() -> None:
    titles = [
        suite_of_commands(commands, patterns={})[0].title
        for commands in (["python a.py"], ["python a.py", "b --token=geheim"], ["a", "b", "c"])
    ]
    assert titles == ["python a.py", "python a.py and b --token=***", "a and 2 others"]


def test_commands_take_turns_and_equal_ones_are_numbered() -> None:
    suite, _ = suite_of_commands(
        [["python", "a.py"], "python a.py", "python 'b c.py'"],
        patterns={"loss": "loss ([0-9.]+)", "step": None},
        figures=["accuracy=acc ([0-9.]+)"],
    )
    assert [contender.name for contender in suite.contenders] == [
        "python a.py #1", "python a.py #2", "python 'b c.py'",
    ]  # fmt: skip
    assert suite.contenders[2].command == ("python", "b c.py")
    assert suite.contenders[0].patterns.figures == {"accuracy": "acc ([0-9.]+)"}
    with pytest.raises(WanmaError, match="there is no command to measure"):
        suite_of_commands([], patterns={})


@pytest.mark.parametrize("name", known_suites())
def test_every_shipped_suite_is_valid(name: str, tmp_path: Path) -> None:
    for is_smoke in (False, True):
        suite, rule = read_suite_or_job(find_suite(name), is_smoke=is_smoke)
        assert suite.file.title
        assert rule.rounds >= 1
        for contender in suite.contenders:
            if contender.kind == "job":
                path = tmp_path / "job.toml"
                path.write_text(suite.job_text.replace("{data}", "images"))
                load_job(path, contender.overrides)


def test_an_unknown_suite_is_refused_with_the_names() -> None:
    with pytest.raises(WanmaError, match=r"'gtp'\. Did you mean 'gpt'") as error:
        find_suite("gtp")
    assert "gpt" in error.value.hint


def test_values_are_listed_or_doubled() -> None:
    assert parse_over(["parallel.dp_replicate=1..3"]) == {"parallel.dp_replicate": [1, 2, 3]}, "as --measure"
    assert parse_over(["parallel.tp=1..8", "train.precision=fp32,bf16"]) == {
        "parallel.tp": [1, 2, 4, 8],
        "train.precision": ["fp32", "bf16"],
    }
    with pytest.raises(WanmaError, match="expected KEY=VALUE"):
        parse_over(["parallel.tp"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("1h30m", 5400.0), ("2d", 172_800.0)]
)
def test_durations_are_as_people_write_them(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


def test_the_environment_of_a_contender_may_name_the_folder_of_the_suite(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        '[[contenders]]\nname = "one"\ncommand = ["true"]\nenvironment = {PYTHONPATH = "{suite}/code"}\n'
    )
    suite, _ = read_suite_or_job(path)
    assert dict(suite.contenders[0].environment) == {"PYTHONPATH": "{suite}/code"}
    placed = place_contender(suite.contenders[0], suite.places)
    assert dict(placed.environment) == {"PYTHONPATH": f"{tmp_path.resolve()}/code"}


JOB = """
[model]
preset = "gpt-1m"

[data]
text = ["stdlib"]

[train]
global_batch = 8
"""


def weak(tmp_path: Path, *over: str, overrides: tuple[str, ...] = ()) -> list[dict[str, str]]:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    suite, _ = read_suite_or_job(path, over=over, overrides=overrides, weak=True)
    return [
        {key: value for key, value in contender.settings.items() if key != THREADS}
        for contender in suite.contenders
    ]


def test_the_batch_of_weak_scaling_grows_with_the_ranks(tmp_path: Path) -> None:
    assert weak(tmp_path, "parallel.dp_replicate=1..4") == [
        {"parallel.dp_replicate": str(ranks), "train.global_batch": str(8 * ranks)} for ranks in (1, 2, 4)
    ]
    found = weak(tmp_path, "parallel.dp_replicate=2,4", "parallel.tp=1,2")
    assert [one["train.global_batch"] for one in found] == ["8", "16", "16", "32"]
    with pytest.raises(WanmaError, match=r"--weak: .* 1 rank"):
        weak(tmp_path, overrides=("train.steps=5",))


def test_weak_scaling_with_the_key_of_a_suite(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text('weak = true\njob = "job.toml"\n[over]\n"parallel.dp_replicate" = [1, 2]\n')
    (tmp_path / "job.toml").write_text(JOB)
    suite, _ = read_suite_or_job(path)
    assert [one.settings["train.global_batch"] for one in suite.contenders] == ["8", "16"]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (["train.global_batch=8,16"], "sets train.global_batch"),
        (["parallel.auto=true,false"], "is open, and so are its ranks"),
        (["parallel.dp_replicate=3,4"], "= 8 on 3 ranks cannot be as large"),
    ],
)
def test_weak_scaling_that_is_none_is_refused(tmp_path: Path, over: list[str], message: str) -> None:
    with pytest.raises(WanmaError, match=message):
        weak(tmp_path, *over)


def test_weak_scaling_of_commands_is_refused(file: Path) -> None:
    with pytest.raises(WanmaError, match="is a command"):
        read_suite_or_job(file, weak=True)
