"""`upgrade_file`: a job file gets the new names in place, and not another character of it changes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from wanma.job.errors import JobError
from wanma.job.file.loading import load_job
from wanma.job.file.renamed_keys import KEYS, VALUES, with_new_names
from wanma.job.file.upgrade import Change, upgrade_file

BOTH = """\
# context = "ring" was the default; stale values are nothing new

parallel.context→cp_method = "ring"   # context of cp
parallel . "sequence→sequence_parallel"=false
'parallel'.shard = 'nothing→none' # nothing

checkpoint = { every_steps = 5, snapshots→in_memory_every_steps = "auto" }  # snapshots

[model]
factory = "package:context"
statistics_group→batch_norm_group = 8
arguments = { context = "nothing", parallel = { shard = "nothing" }, text = \"\"\"
[cluster]
retries = 1
\"\"\" }

[[parallel.compression_groups]]
match = "nothing"
compression = "nothing→none"

[[parallel.compression_groups]]
match = 'retries = "stale"'
compression = "int8"

[ cluster ]
retries→max_restarts=2 # retries
"place→topology_address" = "nothing"

\t[observe]
name = "shared"
"""
"""Job file with each renamed word as OLD→NEW; all else stays."""
OLD, NEW = (re.sub(r"(\w+)→(\w+)", rf"\{side}", BOTH) for side in (1, 2))
YAML = """\
# context: ring
model: {preset: gpt-10m, capacity: 1.5}  # capacity
parallel:
  context: ring   # stale
  "synchronize": 'stale'
  compression_groups:
    - match: nothing
      compression: nothing
  offload_optimizer: "nothing"
cluster: {retries: 1}
"""


def test_keys_and_values_are_renamed_by_their_place_and_all_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "gpt.toml"
    path.write_text(OLD)
    changes = upgrade_file(path)
    assert path.read_text() == NEW
    assert changes == [
        Change(3, "parallel.context → parallel.cp_method"),
        Change(4, "parallel.sequence → parallel.sequence_parallel"),
        Change(5, "parallel.shard: 'nothing' → 'none'"),
        Change(7, "checkpoint.snapshots → checkpoint.in_memory_every_steps"),
        Change(11, "model.statistics_group → model.batch_norm_group"),
        Change(19, "parallel.compression_groups.compression: 'nothing' → 'none'"),
        Change(26, "cluster.retries → cluster.max_restarts"),
        Change(27, "cluster.place → cluster.topology_address"),
    ]
    assert load_job(path).parallel.compression_groups[0].match == "nothing"
    assert upgrade_file(path) == []
    assert path.read_text() == NEW


def test_line_ends_byte_order_mark_and_mode_stay(tmp_path: Path) -> None:
    path = tmp_path / "gpt.toml"
    mixed = OLD.replace("\n", "\r\n", 9)
    path.write_bytes(b"\xef\xbb\xbf" + mixed.encode())
    path.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    upgrade_file(link)
    assert path.read_bytes() == b"\xef\xbb\xbf" + NEW.replace("\n", "\r\n", 9).encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpt.toml", "link.toml"]


def test_yaml_is_rewritten_in_place_too(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(YAML)
    assert [change.line for change in upgrade_file(path)] == [2, 4, 5, 8, 9, 10]
    expected = YAML.replace("capacity: 1.5", "capacity_factor: 1.5").replace("  context:", "  cp_method:")
    expected = expected.replace("'stale'", "'delayed'").replace("compression: nothing", "compression: none")
    expected = expected.replace('"nothing"', '"none"').replace("retries", "max_restarts")
    assert path.read_text() == expected


def test_every_renamed_key_and_value_of_a_full_file_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    text = (Path(__file__).parents[1] / "support" / "older_run" / "job.toml").read_text()
    text = text.replace("[cluster]\n", '[cluster]\ninterface = "eth0"\n')
    text = text.replace("[data]\n", "[data]\ninteraction_log = []\n")
    text = text.replace("[parallel]\n", "[parallel]\nouter_rate = 0.5\noverlap_mix = 0.25\n")
    path.write_text(text)
    changes = [change.text for change in upgrade_file(path)]
    assert {f"{old} → {new}" for old, new in KEYS.items()} <= set(changes)
    given = tomllib.loads(text)["parallel"]
    values = [key for key in VALUES if given.get(key.split(".")[1]) in ("nothing", "shared", "stale")]
    assert len(values) == 7
    assert all(any(change.startswith(f"{key}: ") for change in changes) for key in values)
    assert tomllib.loads(path.read_text()) == with_new_names(tomllib.loads(text))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "gpt.toml"
    path.write_text(OLD)
    assert len(upgrade_file(path, dry_run=True)) == 8
    assert path.read_text() == OLD


def test_a_key_under_both_names_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "gpt.toml"
    text = '[model]\npreset = "gpt-10m"\n[cluster]\nretries = 1\nmax_restarts = 2\n'
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        upgrade_file(path)
    assert f"{path}:4: 'cluster.retries' is renamed to 'cluster.max_restarts', and line 5 sets" in str(
        caught.value
    )
    assert path.read_text() == text


@pytest.mark.parametrize(("name", "text"), [("a.toml", "retries = = 1\n"), ("a.yaml", "retries: [1\n")])
def test_a_file_that_does_not_parse_is_refused_and_stays(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(JobError, match="not valid"):
        upgrade_file(path)
    assert path.read_text() == text


def test_a_file_that_cannot_be_rewritten_is_refused_with_what_to_change(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"  # one text in two places, of which only one is renamed
    text = "model: {preset: gpt-10m}\nobserve: {name: &x nothing}\nparallel: {shard: *x}\n"
    path.write_text(text)
    with pytest.raises(JobError, match=r":2: parallel\.shard: 'nothing' → 'none'"):
        upgrade_file(path)
    assert path.read_text() == text


def test_a_read_only_file_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "my gpt.toml"
    path.write_text(OLD)
    path.chmod(0o444)
    with pytest.raises(JobError, match=r"`chmod u\+w '.*/my gpt\.toml'` first"):
        upgrade_file(path)
    assert path.read_text() == OLD
    assert [file.name for file in tmp_path.iterdir()] == ["my gpt.toml"]


def test_a_file_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    path = tmp_path / f"{'n' * 250}.toml"
    path.write_text(OLD)
    upgrade_file(path)
    assert path.read_text() == NEW


def test_a_yaml_anchor_that_holds_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text("parallel: &p {context: *p}\n")
    with pytest.raises(JobError, match="is nested too deeply"):
        upgrade_file(path)


def test_a_value_with_a_yaml_anchor_is_said_under_the_key_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text("parallel:\n  shard: &x nothing\n  compression: *x\n")
    assert upgrade_file(path) == [Change(2, "parallel.shard: 'nothing' → 'none'")]
    assert path.read_text() == "parallel:\n  shard: &x none\n  compression: *x\n"


@pytest.mark.parametrize(
    ("suffix", "text"),
    [("toml", "[parallel]\nhierarchical = {}\n"), ("yaml", "parallel: {{hierarchical: {}}}\n")],
)
def test_truth_values_become_quoted_words(suffix: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / f"gpt.{suffix}"
    for old, new in (("true", '"hierarchical"'), ("false", '"backend"'), ('"auto"', '"auto"')):
        path.write_text(text.format(old))
        changes = [change.text for change in upgrade_file(path)]
        assert path.read_text() == text.replace("hierarchical", "all_reduce").format(new).replace("{{", "{")
        values = [f"parallel.all_reduce: {old} → '{new.strip(chr(34))}'"] if old != '"auto"' else []
        assert changes == ["parallel.hierarchical → parallel.all_reduce", *values]
