"""Blocks of the documents: every one is accepted, and what a page shows is what its commands do."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from support.pages.blocks import REPOSITORY, Page, PageError, all_pages, page_name, read_page
from support.pages.checks import form_mistakes, mistakes, old_command_mistakes, words
from support.pages.output import mismatch
from support.pages.runner import BlockError, Scratch, run_page, runs_in_process
from wanma.torch_internals.versions import COMPILED_TENSOR_PARALLEL_RECOMPUTE, installed_torch_version

PENDING = frozenset((Path(__file__).parent / "support" / "pages" / "pending.txt").read_text().split())
"""Pages that are still to get blocks that run, or a reason why none does. The list only shrinks."""

COUNTS_PLANS = frozenset({"docs/guides/plan.md", "docs/guides/plan-does-not-fit.md"})
"""Pages with numbers of plans, and choices among them, which differ between versions of torch."""
LONG = frozenset(
    {"docs/guides/what-if.md", "docs/guides/plan-does-not-fit.md", "docs/guides/from/megatron-lm.md"}
)
"""Pages that plan for many devices: they run in the full suite."""

each_page = pytest.mark.parametrize("path", all_pages(), ids=page_name)


def _runs() -> list[object]:
    """Return the pages with blocks to run; some of them belong to the full suite."""
    found = []
    for path in all_pages():
        page = read_page(path)
        if page.blocks_to_run() and page.name not in PENDING:
            is_daily = runs_in_process(page) and page.name not in LONG
            marks = [] if is_daily else [pytest.mark.full, pytest.mark.slow]
            found.append(pytest.param(page, id=page.name, marks=marks))
    return found


@each_page
def test_every_block_is_accepted(path: Path) -> None:
    page = read_page(path)
    assert [*mistakes(page), *old_command_mistakes(page)] == []


@each_page
def test_a_page_has_blocks_that_run_or_says_why_not(path: Path) -> None:
    lacks = form_mistakes(read_page(path))
    if page_name(path) in PENDING:
        assert lacks != [], "it has all it needs: take it out of tests/support/pages/pending.txt"
    else:
        assert lacks == []


def test_pending_pages_exist() -> None:
    assert sorted(PENDING - set(map(page_name, all_pages()))) == [], "take them out of the list"


@pytest.mark.parametrize("page", _runs())
def test_a_page_does_what_it_shows(page: Page, tmp_path: Path) -> None:
    if page.name in COUNTS_PLANS and not COMPILED_TENSOR_PARALLEL_RECOMPUTE.affects(
        installed_torch_version()
    ):
        pytest.skip("this torch can run plans that the page's cannot, and the page was made without them")
    run_page(page, Scratch(tmp_path / "page"))


JOB = """\
```toml title="job.toml"
[model]
preset = "gpt-1m"
[train]
steps = 7
```
"""


def written(folder: Path, text: str) -> Page:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return read_page(path)


def run(folder: Path, text: str) -> Scratch:
    scratch = Scratch(Path(tempfile.mkdtemp(dir=folder)) / "scratch")
    run_page(written(folder, text), scratch)
    return scratch


def test_files_are_written_and_commands_run_in_order(tmp_path: Path) -> None:
    scratch = run(
        tmp_path,
        JOB + "```console\n$ wanma version\nwanma ...\n...\n$ cat job.toml | head -1\n[model]\n"
        "$ LINE=x printenv LINE\nx\n$ cd examples\n$ ls gpt.toml  # of the repository\ngpt.toml\n```\n",
    )
    assert scratch.ran[0].command.text == "wanma version"
    assert (scratch.folder / "job.toml").read_text().startswith("[model]\n")


def test_code_of_a_page_shares_one_namespace_and_its_folder(tmp_path: Path) -> None:
    run(
        tmp_path,
        "```python\nfrom pathlib import Path\nnumber = 3\n```\n"
        '```python\nPath("made").write_text(str(number))\n```\n```console\n$ cat made\n3\n```\n',
    )


def test_code_that_raises_fails_with_the_line_of_the_page(tmp_path: Path) -> None:
    with pytest.raises(BlockError, match=r'page.md", line 3'):
        run(tmp_path, "\n```python\nraise ValueError\n```\n")


def test_a_command_in_the_background_ends_before_the_page_does(tmp_path: Path) -> None:
    page = "```console\n$ sleep 0.1 && echo here > file &\n$ wait\n$ cat file\nhere\n```\n"
    run(tmp_path, page)
    with pytest.raises(BlockError, match="exit code 3"):
        run(tmp_path, "```console\n$ bash -c 'exit 3' &\n```\n")


@pytest.mark.parametrize("command", ["wanma version", "echo one", "echo one | cat"])
def test_another_output_than_shown_fails(tmp_path: Path, command: str) -> None:
    with pytest.raises(BlockError, match="two"):
        run(tmp_path, f"```console\n$ {command}\ntwo\n```\n")


def test_another_exit_code_than_expected_fails(tmp_path: Path) -> None:
    wrong = "```console\n$ wanma job missing.toml\n```\n"
    run(tmp_path, f"<!-- exit: 2 -->\n{wrong}")
    for text in (wrong, f"<!-- exit: 1 -->\n{wrong}", "<!-- exit: 1 -->\n```console\n$ true\n```\n"):
        with pytest.raises(BlockError, match="exit code"):
            run(tmp_path, text)


def test_arguments_of_the_test_are_appended(tmp_path: Path) -> None:
    page = "<!-- run: two -->\n```console\n$ echo one  # more\n```\n"
    assert run(tmp_path, page).ran[0].printed == "one two\n"


def test_a_block_that_is_not_run_is_checked_all_the_same(tmp_path: Path) -> None:
    text = "<!-- not run: needs Slurm -->\n```console\n$ false\n$ wanma trian job.toml\n```\n"
    assert run(tmp_path, text).ran == []
    assert "unknown command 'trian'" in mistakes(written(tmp_path, text))[0]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("```console\n$ wanma train job.toml train.stepps=4\n```\n", "no key train.stepps"),
        ("```console\n$ X=1 wanma plan job.toml --clutser x | cat\n```\n", "unknown option --clutser"),
        ("```console\n$ wanma job --upgraed\n```\n", "unknown option --upgraed"),
        ("```console\nwanma version\n```\n", "begins with a command"),
        ("```toml\n[train]\nstepps = 4\n```\n", "train.stepps"),
        ("```toml\n[train\n```\n", "line 1"),
        ('```toml title="other.toml"\n[train]\nsteps = 0\n```\n', "train.steps"),
        ('```toml\n[[nodes]]\ndevice = "H100 SMX"\ndevices = 8\n```\n', "H100 SMX"),
        ("```toml\n[between]\ngb = 8\n```\n", "between.gb"),
        ("```python\ndef f(:\n```\n", "invalid syntax"),
        ("```json\n{]\n```\n", "Expecting"),
        ("<!-- run: x -->\n```console\n$ ls\n$ ls\n```\n", "one command"),
    ],
)
def test_a_mistake_in_a_block_is_found_without_running_it(tmp_path: Path, text: str, mistake: str) -> None:
    (found,) = mistakes(written(tmp_path, JOB + text))
    assert mistake in found


def test_a_partial_job_is_merged_with_the_first_job_of_the_page(tmp_path: Path) -> None:
    assert mistakes(written(tmp_path, JOB + "```toml\n[train]\nwarmup_steps = 7\n```\n")) == []
    assert mistakes(written(tmp_path, JOB + '```toml\n[model]\npreset = "gpt-10m"\n```\n')) == []


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ ls\n",
        "<!-- exit: x -->\n```console\n$ ls\n```\n",
        "<!-- exit: 1 -->\n\ntext\n",
        "---\nrunnable: no\n---\n",
    ],
)
def test_a_page_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PageError):
        written(tmp_path, text)


def test_the_form_of_a_page_is_checked(tmp_path: Path) -> None:
    console = "```console\n$ ls\n```\n"
    assert form_mistakes(written(tmp_path, console)) == []
    assert form_mistakes(written(tmp_path, '---\nrunnable: "no: a table"\n---\n')) == []
    for text in (
        "words\n",
        f"{console}\n```bash\nls\n```\n",
        '---\nrunnable: "no: a table"\n---\n' + console,
        f"{console}\n```\nx\n```\n",
    ):
        assert len(form_mistakes(written(tmp_path, text))) == 1
    assert len(form_mistakes(written(tmp_path, f"{console}\n    wanma version\n"))) == 1


@pytest.mark.parametrize(
    ("shown", "is_right"),
    [
        (["a", "b", "c"], True),
        (["...", "c"], True),
        (["a", "..."], True),
        (["a", "...", "c"], True),
        (["..."], True),
        (["a   b...", "c"], False),
        (["b", "c"], False),
        (["a", "b"], False),
        (["a", "c"], False),
        (["...", "c", "b", "..."], False),
        (["...", "b", "..."], True),
        (["...", "a", "...", "a", "..."], False),
    ],
)
def test_dots_stand_for_what_is_left_out(shown: list[str], is_right: bool) -> None:
    assert (mismatch(shown, "a\n\nb\nc\n") is None) is is_right


def test_a_line_may_be_wrapped_and_shortened() -> None:
    assert mismatch(["loss ... in", "4 s"], "loss  2.1 in 4 s\n") is None
    assert mismatch(["loss ... in", "5 s"], "loss  2.1 in 4 s\n") is not None
    assert mismatch(["loss ... in"], "loss  2.1 in 4 s\n") is not None


def test_only_a_shell_understands_some_commands() -> None:
    assert words('wanma plan a.toml --cluster "2x8 H100" # best') == [
        "wanma",
        "plan",
        "a.toml",
        "--cluster",
        "2x8 H100",
    ]
    for command in ("ls *.toml", "a | b", "a > b", "echo $HOME", 'echo "$HOME"', "a && b"):
        assert words(command) is None
    assert words("wanma train 'parallel.allow=[\"fp8\"]'") == ["wanma", "train", 'parallel.allow=["fp8"]']


def test_the_list_of_pending_pages_names_pages_of_the_repository() -> None:
    assert all((REPOSITORY / name).suffix == ".md" for name in PENDING)
