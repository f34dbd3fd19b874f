"""Child process that prepares the text of a job, or measures the preparation.

The section comes in; progress, the traffic with stores and an error, if any, go out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from wanma.data.cache.node_cache import process_traffic
from wanma.data.stores.client import Traffic
from wanma.data.text.corpus import (
    TextSource,
    build_token_files,
    load_job_tokenizer,
    preparation_of,
    resolve_text_sources,
)
from wanma.data.text.tokenizer import Tokenizer
from wanma.job.errors import WanmaError
from wanma.job.forecast.data_feed import TextPreparation
from wanma.job.run.child_process import ChildProcess, Message, serve_parent
from wanma.job.sections.data import DataSection

_MODULE = "wanma.data.text.preparation_process"
_MEASURE, _ANNOUNCE = "--measure", "--announce"
"""Arguments of a process that measures and prepares nothing, and of one that measures before it prepares."""
Corpus = tuple[Sequence[TextSource], Tokenizer]


def prepare_in_subprocess(
    section: DataSection,
    progress: Callable[[int, int], None] | None,
    announce: Callable[[TextPreparation], None] | None = None,
    corpus: Corpus | None = None,
) -> Traffic:
    """Build token files in a child process, so that its threads end with it.

    Args:
        section: the job's `[data]`.
        progress: called with (bytes done, bytes in all).
        announce: called before it begins, with what is to be prepared.
        corpus: the job's corpus if it is known here; a new interpreter looks for it again.

    Returns:
        The traffic of the process with stores.
    """
    arguments = [] if announce is None else [_ANNOUNCE]
    traffic: Traffic = Counter()
    child = ChildProcess(partial(_serve, arguments, corpus), _MODULE, *arguments)
    try:
        child.send({"section": section.model_dump_json()})
        for message in child.answers():
            if "error" in message:
                raise WanmaError(*message["error"])
            if "preparation" in message:
                if announce is not None:
                    announce(TextPreparation.from_json(message["preparation"]))
            elif "traffic" in message:
                traffic.update({(kind, name): amount for kind, name, amount in message["traffic"]})
            elif progress is not None:
                progress(*message["progress"])
        code = child.wait()
    finally:
        child.close()
    if code:
        raise WanmaError(f"the data preparation process exited with code {code}", "see its message above")
    return traffic


def measure_in_subprocess(section: DataSection, deadline_seconds: float) -> TextPreparation:
    """Return the preparation that a job's text needs, measured in a child process.

    Raises:
        WanmaError: the text is missing or cannot be read, or its store did not answer in time.
    """
    command = [sys.executable, "-m", _MODULE, _MEASURE]
    try:
        child = subprocess.run(
            command,
            input=json.dumps({"section": section.model_dump_json()}),
            capture_output=True,
            text=True,
            timeout=deadline_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WanmaError(
            f"the store did not answer within {deadline_seconds:g} s; data.probe_store=false asks it nothing"
        ) from None
    for line in child.stdout.splitlines():
        message = json.loads(line)
        if "error" in message:
            raise WanmaError(*message["error"])
        return TextPreparation.from_json(message["preparation"])
    raise WanmaError(f"the measuring process exited with code {child.returncode}: {child.stderr[-300:]}")


def _serve(
    arguments: Sequence[str],
    corpus: Corpus | None,
    requests: Iterator[Message],
    answer: Callable[[Message], None],
) -> None:
    section = DataSection.model_validate_json(next(requests)["section"])
    try:
        texts, tokenizer = corpus or (resolve_text_sources(section), load_job_tokenizer(section))
        tokenizer.speed_up()
        if arguments:
            answer({"preparation": asdict(preparation_of(section, texts, tokenizer))})
        if _MEASURE not in arguments:
            build_token_files(
                section, texts, tokenizer, lambda processed, total: answer({"progress": [processed, total]})
            )
            answer({"traffic": [[*key, amount] for key, amount in process_traffic().items()]})
    except WanmaError as error:
        answer({"error": [error.message, error.hint, error.exit_code]})


if __name__ == "__main__":
    serve_parent(partial(_serve, sys.argv[1:], None))
