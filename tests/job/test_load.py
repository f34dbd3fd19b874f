"""Job files: what is accepted, and what is said about what is not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.job.errors import EXIT_USAGE, JobError
from wanma.job.file.loading import load_job, to_job
from wanma.job.file.other_names import KEYS_BY_OTHER_NAME
from wanma.job.file.schema import schema_keys
from wanma.job.sections.job import Job
from wanma.job.sections.model import ModelSection

MODEL = '[model]\npreset = "gpt-10m"\n'


def write(folder: Path, text: str, name: str = "job.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        load_job(path, overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(f"{path.parent}/", "")


def test_a_file_sets_what_it_names_and_leaves_the_rest_at_its_default(tmp_path: Path) -> None:
    job = load_job(
        write(tmp_path, MODEL + "[train]\nsteps = 7\nbetas = [0.8, 0.9]\nbatch_ramp = [[0, 4], [9, 8]]\n")
    )
    assert job.model.preset == "gpt-10m"
    assert (job.train.steps, job.train.betas, job.train.batch_ramp) == (7, (0.8, 0.9), [(0, 4), (9, 8)])
    assert job.train.global_batch == 32


def test_a_run_is_named_after_its_file_unless_the_job_names_it(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL, "gpt.toml")
    assert load_job(path).observe.name == "gpt"
    assert load_job(path, ["observe.name=second"]).observe.name == "second"


def test_parallel_auto_is_short_for_a_table_and_keeps_axes_given_beside_it(tmp_path: Path) -> None:
    auto = load_job(write(tmp_path, 'parallel = "auto"\n' + MODEL))
    assert auto.parallel.auto
    path = write(tmp_path, MODEL + "[parallel]\ntp = 2\n")
    mixed = load_job(path, ["parallel=auto", "parallel.pp=2"]).parallel
    assert (mixed.auto, mixed.tp, mixed.pp) == (True, 2, 2)


def test_one_text_is_a_list_of_one(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, MODEL + '[data]\ntext = "stdlib"\n')).data.text == ["stdlib"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("train.optimiser", "'train.optimizer'"),
        ("train.max_steps", "'train.steps'"),
        ("train.grad_clip", "'train.gradient_clip'"),
        ("train.weight_dacay", "'train.weight_decay'"),
        ("data.sequence", "'data.sequence_length'"),
        ("parallel.microbatch", "'parallel.micro_batch'"),
        ("cluster.hang_timeout", "'cluster.hang_timeout_seconds'"),
        ("checkpoint.every_step", "'checkpoint.every_steps'"),
        ("observe.tensorbord", "'observe.tensorboard'"),
        ("train.dp_shrad", "'parallel.dp_shard'"),
        ("parallel.cotext", "'parallel.cp_method', the new name of 'parallel.context'"),
        ("parallel.sequnce", "'parallel.sequence_parallel', the new name of 'parallel.sequence'"),
        ("cluster.retry", "'cluster.max_restarts', the new name of 'cluster.retries'"),
        ("checkpoint.snapshot", "'checkpoint.in_memory_every_steps', the new name of 'checkpoint.snapshots'"),
        ("train.lr", "'train.learning_rate'"),
        ("train.batch_size", "'train.global_batch'"),
        ("parallel.tensor-parallel", "'parallel.tp'"),
        ("data.column", "'data.columns'"),
        ("train.statistics_groups", "'model.batch_norm_group', the new name of 'model.statistics_group'"),
    ],
)
def test_a_misspelt_key_leads_to_a_key_of_its_own_section_first(
    tmp_path: Path, given: str, meant: str
) -> None:
    text = refusal(write(tmp_path, f"{MODEL}\n"), f"{given}=1")
    first = text.splitlines()[0]
    assert first == f"override 1 on the command line: unknown key '{given}'. Did you mean {meant}?"


def test_an_unknown_key_is_told_with_its_line_and_the_key_that_was_meant(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, MODEL + "\n[train]\nstpes = 3\n"))
    assert text.splitlines()[0] == "job.toml:5: unknown key 'train.stpes'. Did you mean 'train.steps'?"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("trian.steps = 3", "section 'trian'. Did you mean 'train'?"),
        ("steps = 3", "'steps'. It belongs in [train]."),
        ("zzz = 3", "unknown section 'zzz'. There are: "),
        ("train.dp_shard = 2", "unknown key 'train.dp_shard'. Did you mean 'parallel.dp_shard'?"),
        ("train.parallel = 2", "unknown key 'train.parallel'. [parallel]"),
        ("train.zzz = 2", "unknown key 'train.zzz'."),
        ('train.steps = "many"', 'train.steps = "many": must be a whole'),
        ("train.steps = 2.0", "train.steps = 2.0: must be a whole"),
        ("train.steps = true", "train.steps = true: must be a whole"),
        ("train.steps = -1", "train.steps = -1: must be a whole"),
        ("train.seed = {}", "train.seed = {}: must be a whole"),
        (
            "train.learning_rate = nan",
            "train.learning_rate = nan: must be a number > 0 and <= 1,000, and finite.",
        ),
        ("train.gradient_clip = inf", "train.gradient_clip = inf: must be"),
        ("train.momentum = 1", "train.momentum = 1: must be"),
        ('train.optimizer = "adam"', "adamw, sgd, adafactor, muon. Did you mean 'adamw'?"),
        ('train.deterministic = "True"', "or false. Did you mean 'true'?"),
        ("train.betas = [0.9]", "train.betas = [0.9]: must be [number"),
        ('train.batch_ramp = [[1, 2], [3, "x"]]', "a list of [whole number, whole number]."),
        ("train.batch_ramp = [[5, 2], [5, 4]]", "batch_ramp must rise (given: [5, 5])"),
        ("train.betas = [0.9, 1.0]", "[train] betas must be at least 0"),
        ('parallel = "atuo"', 'parallel = "atuo": must be a table'),
        ("observe = 4", "observe = 4: must be a table"),
        ('model.family = "decoder"', "(given: preset, family)"),
        ("data = {text = ['a'], images = 'b'}", "[data] give only one of path, text, sources"),
        ("data.sources = [{name = 'a', text = []}]", "[data.sources[0]] the source 'a' needs"),
        (
            "data.sources = [{name = 'a', text = ['b'], weight = 0}]",
            "data.sources[0].weight = 0: must be",
        ),
        (
            "data.sources = [{name = 'a', text = ['b'], weight = [[0, 1], [5]]}]",
            "sources[0].weight = [[0, 1], [5]]: must",
        ),
        (
            "data.sources = [{name = 'a', text = ['b'], weight = [[1, 1]]}]",
            "must begin with sample 0 (given: [1])",
        ),
        (
            "data.sources = [{name = 'a', text = ['b'], weight = [[0, 1], [9, 0], [9, 1]]}]",
            "must rise, up to 2**62 (given: [0, 9, 9])",
        ),
        (
            "data.sources = [{name = 'a', text = ['b'], weight = [[0, 1], [9, -1]]}]",
            "and one above 0 (given: [1.0, -1.0])",
        ),
        (
            "data.sources = [{name = 'a', text = ['b'], weight = [[0, 1], [9, 0]]}]",
            "have weight 0 from sample 9 on",
        ),
        ('data.shuffle = "blocks"', 'data.shuffle = "blocks": must be one of'),
        ("data.sources = [{text = ['a']}]", "data.sources[0].name is missing"),
        ("data.sources = [3]", "data.sources[0] = 3: must be a table"),
        ('cluster.rendezvous = "here"', "[cluster] rendezvous must be HOST:PORT"),
        ("cluster = {nodes = 2, node_rank = 2}", "[cluster] node_rank must be 0 to nodes"),
    ],
)
def test_a_wrong_line_is_told_with_what_was_given_and_what_is_allowed(
    tmp_path: Path, line: str, told: str
) -> None:
    text = refusal(write(tmp_path, f'# a job\nmodel.preset = "gpt-10m"\n\n{line}\n'))
    first = text.splitlines()[0]
    assert told in first
    assert first.startswith("job.toml:2: " if "model" in line else "job.toml:4: ")


def test_all_mistakes_are_listed_at_once_in_the_order_of_the_file_and_then_of_the_command_line(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, MODEL + '[train]\nprecision = "fp8"\n[data]\ntekst = ["a"]\n')
    assert refusal(path, "cluster.nodes=0", "train.seed=x", "train.steps=9").splitlines()[:5] == [
        "the job has 4 mistakes",
        '  job.toml:4: train.precision = "fp8": must be one of fp64, fp32, bf16, fp16.',
        "  job.toml:6: unknown key 'data.tekst'. Did you mean 'data.text'?",
        "  override 1 on the command line: cluster.nodes = 0: must be a whole number >= 1 and <= 1,000,000.",
        '  override 2 on the command line: train.seed = "x": must be a whole number >= 0 and '
        "<= 9,223,372,036,854,775,807.",
    ]


def test_a_job_without_a_model_is_told_how_to_get_one(tmp_path: Path) -> None:
    assert "the job has no [model] section; add one" in refusal(write(tmp_path, ""))


def test_broken_toml_is_told_with_its_line_and_the_usual_cause(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, MODEL + "[train]\nprecision = bf16\n"))
    assert text.startswith("job.toml:4: not valid TOML: ")
    assert "precision = bf16" in text
    assert 'put text in quotes: precision = "bf16"' in text
    assert "this looks like YAML" in refusal(write(tmp_path, "model:\n  preset: gpt-10m\n"))
    assert refusal(write(tmp_path, MODEL + "[train\n")).startswith("job.toml:3: not valid TOML")
    assert refusal(write(tmp_path, 'a = """x\n\n')).startswith("job.toml:2: not valid TOML")


def test_a_link_to_nothing_is_no_job_file_nearby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    link = tmp_path / "gpt.toml"
    link.symlink_to("moved.toml")
    with pytest.raises(JobError, match=r"gpt\.toml\.\n .*`wanma job --toml`"):
        load_job(link)


def test_a_missing_file_is_told_with_the_job_files_nearby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("gpt.toml")) == (
        "there is no job file gpt.toml.\n  print one to start from with `wanma job --toml`"
    )
    (tmp_path / "examples").mkdir()
    write(tmp_path / "examples", MODEL, "gpt.toml")
    write(tmp_path, "", "pyproject.toml")
    assert refusal(Path("gtp.toml")) == (
        "there is no job file gtp.toml. Did you mean 'examples/gpt.toml'?\n"
        "  job files nearby: examples/gpt.toml"
    )
    assert "Did you mean 'examples/gpt.toml'" in refusal(Path("gpt"))
    assert "Did you mean" not in refusal(Path("nope.toml")), "that both end in .toml makes them no more alike"


def test_a_folder_a_binary_file_and_an_endless_nesting_are_no_job_files(tmp_path: Path) -> None:
    assert "is a folder, not a job file" in refusal(tmp_path)
    binary = tmp_path / "job.toml"
    binary.write_bytes(b"steps = \xff")
    assert "byte 8 is not valid UTF-8 text" in refusal(binary)
    assert "nested too deeply" in refusal(
        write(tmp_path, f"model.arguments = {{a = {'[' * 500}{']' * 500}}}")
    )
    assert "nested too deeply" in refusal(write(tmp_path, f"model.arguments = {{a = {'[' * 99}{']' * 99}}}"))


def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf[model]\r\npreset = 'x'\r\n\r\n[train]\r\nstpes = 1\r\n")
    assert refusal(path).startswith("job.toml:5: unknown key 'train.stpes'")


def test_yaml_reads_like_toml_and_points_at_its_lines(tmp_path: Path) -> None:
    good = (
        "model: {preset: gpt-10m}\n"
        "train:\n  learning_rate: 1e-4\n  betas: [0.9, 0.99]\n"
        "observe: {name: 2026-01-01}\n"
    )
    job = load_job(write(tmp_path, good, "job.yaml"))
    assert (job.train.learning_rate, job.train.betas, job.observe.name) == (1e-4, (0.9, 0.99), "2026-01-01")
    bad = "model: {preset: gpt-10m}\ndata:\n  sources:\n    - name: a\n      text: [x]\n      wait: 2\n"
    first = refusal(write(tmp_path, bad, "job.yaml")).splitlines()[0]
    assert first == "job.yaml:6: unknown key 'data.sources[0].wait'. Did you mean 'data.sources[0].weight'?"
    assert refusal(write(tmp_path, "a: [1\nb: 2", "job.yml")).startswith("job.yml:2: not valid YAML")
    assert "is a mapping of sections" in refusal(write(tmp_path, "- a\n", "job.yaml"))
    assert "the job has no [model] section" in refusal(write(tmp_path, "", "job.yaml"))
    assert (
        load_job(write(tmp_path, "model: {preset: a}\ntrain:\n  # steps: 3\n", "job.yaml")).train.steps == 300
    )
    assert "nested too deeply" in refusal(write(tmp_path, "model: &a\n  arguments: *a\n", "job.yaml"))


def test_yaml_never_builds_python_objects(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, "model: !!python/object/apply:os.getcwd []\n", "job.yaml"))
    assert "job.yaml:1: not valid YAML" in text


def test_a_duplicate_key_in_yaml_is_refused_as_in_toml(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, "model: {preset: a}\ntrain:\n  steps: 3\n  steps: 4\n", "job.yaml"))
    assert "job.yaml:4: not valid YAML: 'steps'" in text


def test_null_may_unset_a_key_but_not_hide_inside_arguments(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, "model: {preset: a, layers: null}\n", "job.yaml"))
    assert job.model.layers is None
    text = refusal(write(tmp_path, "model: {factory: 'a:b', arguments: {x: null}}\n", "job.yaml"))
    assert "model.arguments.x is null" in text


def test_python_gives_a_job_a_mapping_or_a_path(tmp_path: Path) -> None:
    job = to_job({"model": {"preset": "gpt-10m"}, "train": {"betas": (0.5, 0.6)}, "parallel": "auto"})
    assert (job.train.betas, job.parallel.auto) == ((0.5, 0.6), True)
    assert to_job(job) is job
    assert to_job({"model": ModelSection(preset="x")}) == Job(model=ModelSection(preset="x"))
    assert to_job(job, ["train.steps=2"]).train.steps == 2
    assert to_job(str(write(tmp_path, MODEL))).model.preset == "gpt-10m"


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (3, "from int"),
        ({"model": {"factory": "a:b", "arguments": {"x": object()}}}, r"model\.arguments\.x"),
        ({"model": {"factory": "a:b", "arguments": {3: 4}}}, "the name 3 "),
    ],
)
def test_python_is_told_what_a_job_cannot_hold(content: Any, fact: str) -> None:
    with pytest.raises(JobError, match=fact):
        to_job(content)


_WORDS = st.sampled_from(
    [
        *Job.model_fields,
        *{key.name for key in schema_keys().values()},
        "",
        "0",
        "stpes",
        "none",
        "décor",
        "a b",
    ]
)
_ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        _WORDS,
        st.text(max_size=5),
        st.dates(),
        st.binary(max_size=2),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_WORDS, inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(_WORDS, st.one_of(_ANYTHING, st.dictionaries(_WORDS, _ANYTHING, max_size=5)), max_size=5),
    st.lists(st.tuples(_WORDS, _WORDS, st.text(max_size=6)), max_size=2),
)
def test_whatever_is_given_becomes_a_job_or_one_message(
    tables: dict[str, Any], overrides: list[tuple[str, str, str]]
) -> None:
    try:
        job = to_job(tables, [f"{section}.{key}={value}" for section, key, value in overrides])
    except JobError:
        return
    assert isinstance(job, Job)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("[]{}=.#\"'\n\\, a1_-+:eE")))
def test_whatever_a_file_holds_is_a_job_or_one_message(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), text)
        with pytest.raises(JobError, match=r"job\.toml"):
            load_job(path)


def test_a_number_or_date_that_cannot_be_is_refused(tmp_path: Path) -> None:
    assert "job.toml" in refusal(write(tmp_path, "observe.name = 2026-02-31\n"))
    assert "job.yaml" in refusal(write(tmp_path, "observe: {name: 2026-02-31}\n", "job.yaml"))
    assert "must be a whole number > 0" in refusal(write(tmp_path, MODEL), f"train.steps={'9' * 5000}")
    assert "job.toml" in refusal(write(tmp_path, f"train.steps = {'9' * 5000}\n"))
    assert "must be a whole number > 0" in refusal(
        write(tmp_path, f"model.preset = 'x'\ntrain.steps = -{'9' * 50}\n")
    )


def test_a_range_of_machines_is_the_most_and_the_least(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + '[cluster]\nnodes = "2..8"\n')
    cluster = load_job(path).cluster
    assert (cluster.nodes, cluster.min_nodes) == (8, 2)
    again = load_job(path, ["cluster.nodes=3..4"]).cluster
    assert (again.nodes, again.min_nodes) == (4, 3)
    assert load_job(path, ["cluster.nodes=4"]).cluster.min_nodes is None
    assert "cluster.nodes = '8..2'" not in refusal(path, "cluster.nodes=many")
    assert "(given: '8..2')" in refusal(path, "cluster.nodes=8..2")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://me:hunter2@host/corpus.txt",
        "https://host/corpus.txt?X-Amz-Signature=hunter2",
        "https://host/corpus.txt?part=1&token=hunter2",
    ],
)
@pytest.mark.parametrize("form", ["text = ['{url}']", "[[data.sources]]\nname = 'a'\ntext = '{url}'"])
def test_a_secret_in_a_url_of_data_is_refused_and_not_repeated(form: str, url: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"model.preset = 'gpt-1m'\n[data]\n{form.format(url=url)}\n")
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert "a URL holds a password or key" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket/part-?.txt", "https://host/get?file=corpus.txt", "a?b.txt"])
def test_a_glob_and_a_query_without_a_secret_are_no_secrets(url: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"model.preset = 'gpt-1m'\n[data]\ntext = ['{url}']\n")
    assert load_job(path).data.text == [url]


def test_names_of_other_libraries_lead_to_keys_that_exist() -> None:
    assert set(KEYS_BY_OTHER_NAME.values()) <= set(schema_keys(Job))
    own_names = {key.rpartition(".")[2] for key in schema_keys(Job)}
    assert not own_names & set(KEYS_BY_OTHER_NAME)


@pytest.mark.parametrize(
    ("section", "word", "key"), [("servers", "ps", "servers.count"), ("parallel", "worker", "dp_replicate")]
)
def test_words_of_tensorflow_lead_to_servers_and_workers(
    tmp_path: Path, section: str, word: str, key: str
) -> None:
    assert key in refusal(write(tmp_path, f"{MODEL}[{section}]\n{word} = 2\n"))
