"""Preparation of a job's data by several nodes that have the cache folder in common.

Each node runs the same preparation. Token files are cut into tasks and indexes into files, each of which
one node does (`text/shared_tasks.py`, `index/build.py`); any of the nodes may die. Here they only find out
that they share the cache at all. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Sequence

from wanma.data.images.image_splits import find_image_split
from wanma.data.index.records import cache_folder
from wanma.data.opening import prepare_job_data
from wanma.data.stores.listing import StoredFile
from wanma.data.stores.node_meeting import meet_nodes
from wanma.data.text.corpus import resolve_text_sources
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data import DataSection

WAIT_SECONDS = 300.0
"""Time in which all nodes come: a scheduler starts them together, people within minutes."""


def prepare_on_nodes(
    section: DataSection,
    nodes: int,
    node: int,
    progress: Callable[[int, int], None] | None = None,
    on_wait: Callable[[Sequence[int]], None] | None = None,
) -> None:
    """Prepare the data of a job together with other nodes, which call this too; see `prepare_job_data`.

    Args:
        section: the job's `[data]`; its cache is a folder that all nodes have in common.
        nodes: number of nodes.
        node: number of this node in [0, nodes).
        progress: called with (bytes done, bytes in all); of token files by all nodes.
        on_wait: called once with the nodes that are waited for.

    Raises:
        JobError: the nodes have different parts of the data.
        WanmaError: the nodes do not share the cache folder, or as of `prepare_job_data`.
    """
    if section.placement == "parts":
        raise JobError(
            "data.placement = 'parts': each node prepares the parts that it has",
            "run `wanma data prepare` on each node without --nodes",
        )
    folder = cache_folder(section.cache) / "preparation" / _identity(section)
    name = f"{socket.gethostname()}-{node}"
    done = folder / "done"
    if done.exists():  # the last node of an interrupted preparation comes when the others are gone
        prepare_job_data(section, progress, node=name)
        return
    try:
        with meet_nodes(folder, nodes, node, WAIT_SECONDS, on_wait):
            prepare_job_data(section, progress, node=name)
            done.touch()
    except OSError as error:
        raise WanmaError(
            f"cannot prepare in {folder}: {error.strerror or error}",
            "choose another folder that all nodes share with data.cache",
        ) from error


def _identity(section: DataSection) -> str:
    """Return the hash of the files and the keys that decide about the preparation."""
    files: list[StoredFile] = []
    if section.has_images:
        entries = [(source.images, f"data.sources[{n}].images") for n, source in enumerate(section.sources)]
        for images, key in entries or [(section.images, "data.images")]:
            split = find_image_split(images, key)
            files += [*split.train.files, *split.validation.files]
    else:
        files += [document for text in resolve_text_sources(section) for document in text.documents]
    keys = section.model_dump(
        mode="json", include={"text_field", "sources", "tokenizer", "bad_data", "image_transform"}
    )
    described = [[file.url, file.size, file.version] for file in files]
    text = json.dumps([keys, described], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
