"""Section `[data]` of a job file: training data, tokenizer and loader."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.sections.data_sources import (
    ColumnsSection,
    DataKind,
    EntriesSection,
    SourceSection,
    TextList,
)
from wanma.job.sections.images import ImageTransformSection
from wanma.job.sections.recommender import InteractionsSection

LEAST_STEPS_AHEAD = 4
"""Steps that `prefetch` = "auto" loads ahead if the loop never waits."""


class ChatSection(Section):
    """Rows of conversations (`columns.messages`): each is whole in one row, filled up without targets."""

    packing: bool = Field(
        True,
        description="consecutive conversations share a row while they fit; false: one conversation a row",
    )
    too_long: Literal["refuse", "cut", "skip"] = Field(
        "refuse",
        description="consequence of a conversation longer than the row of `data.sequence_length`: an error; "
        "its end is cut off; or it is left out; the last two are counted",
    )


class DataSection(EntriesSection):
    """Training data: stored data of any format, or a custom dataset."""

    text: TextList = Field(
        default_factory=list,
        description="files, folders, globs, fsspec URLs of plain text, records (JSON lines, Parquet and "
        "others) or tokens (Megatron, numpy); 'stdlib': Python's own source",
    )
    sources: list[SourceSection] = Field(
        default_factory=list,
        description="weighted mixture of sources, all text, all images, or all tables and factories",
    )
    images: TextList = Field(
        default_factory=list,
        description="labelled images: files, folders, globs, URLs of image folders, WebDataset, Parquet "
        "and others; or MNIST IDX, CIFAR-10 binary, .npz",
    )
    image_transform: ImageTransformSection = Field(
        default_factory=ImageTransformSection,
        description="transform of `data.images`, and of all sources of images",
    )
    interactions: InteractionsSection = Field(
        default_factory=InteractionsSection, description="target and split of interactions"
    )
    factory: str | None = Field(None, description="'package.module:function' returning a map-style dataset")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")
    tokenizer: str = Field("bytes", description="'bytes', or the path of a Hugging Face tokenizer.json")
    chat: ChatSection = Field(default_factory=ChatSection, description="rows of conversations")
    sequence_length: int = Field(256, gt=0, le=1_000_000_000, description="tokens per sample")
    document_masks: bool = Field(
        False, description="mask attention between documents, and restart positions at each"
    )
    validation_fraction: float = Field(
        0.01, ge=0, lt=1, description="share of documents used for validation only"
    )
    shuffle: Literal["full", "block", "none"] = Field(
        "full",
        description="order of an epoch: full: each sample at random; block: blocks of consecutive samples at "
        "random, and the samples of several blocks, for stores with slow random reads; none: as stored",
    )
    block_samples: Literal["file"] | Annotated[int, Ge(1), Le(1_000_000_000)] = Field(
        1024,
        description="shuffle = 'block': consecutive samples in a block; 'file': each file of images is a "
        "block, and one in a store is read when its turn comes, so that training begins before all are here",
    )
    window_blocks: int = Field(
        32, ge=1, le=1_000_000, description="shuffle = 'block': blocks whose samples are shuffled together"
    )
    cache: str | None = Field(
        None,
        description="folder of token files, indexes, copies of remote data; default: the user's cache folder",
    )
    cache_bytes: int = Field(
        64 << 30,
        ge=0,
        le=1 << 60,
        description="largest size in bytes of the copies of remote data in the cache, and of the arrays of "
        "interactions there",
    )
    probe_store: bool = Field(
        True,
        description="measure latency and bandwidth of a remote store for forecasts, weekly, by the first "
        "bytes of some files",
    )
    store_retry_seconds: float = Field(
        240.0,
        ge=0.1,
        le=31_536_000,
        description="seconds for which a failed read of a remote store is tried again before it ends the "
        "run; below `cluster.hang_timeout_seconds`",
    )
    bad_data: Literal["refuse", "skip", "substitute"] | None = Field(
        None,
        description="consequence of damaged files and rows: an error, left out and listed, or (images alone) "
        "another sample; unset: an error, but invalid UTF-8 in plain text becomes U+FFFD",
    )
    bad_data_limit: int = Field(
        100,
        ge=0,
        le=1_000_000_000_000,
        description="damaged files and rows from which on skipping is an error",
    )
    prefetch: Literal["auto"] | Annotated[int, Ge(1), Le(10_000)] = Field(
        "auto",
        description="optimizer steps of data loaded ahead of the training loop; auto: at least 4, and more "
        "while the loop waits, as far as `prefetch_bytes` allows",
    )
    prefetch_bytes: int = Field(
        1 << 30,
        ge=1,
        le=1 << 60,
        description="largest size in bytes of the steps loaded ahead, per rank; one step always is",
    )
    workers: Literal["auto"] | Annotated[int, Ge(1), Le(1_024)] = Field(
        "auto",
        description="loader threads per rank; auto: as many as keep its device busy by forecast, up to its "
        "cores; a dataset of your own is read by one unless worker_processes is true",
    )
    placement: Literal["shared", "parts"] = Field(
        "shared",
        description="shared: all nodes have the same data; parts: each node has some of it, found by the "
        "same entries of `path`, `text` or `images`; read there and handed over, in one order over all",
    )
    part_order: Literal["global", "interleaved"] = Field(
        "global",
        description="placement = 'parts': global: one order over all parts; interleaved: each part in its "
        "own order, in proportion to its size, so that most samples are computed on a node that has them",
    )
    shared_reading: Literal["auto", "always", "never"] = Field(
        "auto",
        description="one rank reads for all that need the same samples (tensor, context and pipeline "
        "parallel ranks): auto: images in stored files, and datasets with several workers; token files are "
        "memory-mapped by each rank",
    )
    worker_processes: bool | None = Field(
        None,
        description="loader processes instead of threads, for images, tables or a dataset whose Python code "
        "takes the time; unset: where image transforms or formats of other packages work on the samples",
    )
    check_reads: bool = Field(
        True,
        description="read eight samples of your own dataset twice before the first step, and refuse one that "
        "depends on earlier reads or on other threads",
    )

    @property
    def worker_count(self) -> int:
        """Number of loader threads of a rank: `workers`, or 1 before a plan has chosen it ("auto")."""
        return self.workers if isinstance(self.workers, int) else 1

    @property
    def names_loader_processes(self) -> bool:
        """True if the job asks for loader processes, itself or by image transforms of other packages."""
        if self.worker_processes is not None:
            return self.worker_processes
        return self.has_images and self.image_transform.has_own_changes

    def steps_ahead(self, threads: int) -> int:
        """Return the steps that `threads` loader threads load ahead of the loop, at the least."""
        return self.prefetch if isinstance(self.prefetch, int) else max(LEAST_STEPS_AHEAD, threads)

    @property
    def located_sources(self) -> list[tuple[str, EntriesSection]]:
        """Sources of stored data or programs, each with its table in the job: 'data' or 'data.sources[0]'."""
        if not self.sources:
            return [("data", self)]
        return [(f"data.sources[{number}]", source) for number, source in enumerate(self.sources)]

    def _holds(self, *kinds: DataKind) -> bool:
        return any(source.content in kinds for _, source in self.located_sources)

    @property
    def has_images(self) -> bool:
        """True if the samples are stored images."""
        return self._holds("images")

    @property
    def has_text(self) -> bool:
        """True if the section names text, tokens or conversations."""
        return self._holds("text")

    @property
    def has_interactions(self) -> bool:
        """True if the samples are interactions of users and items."""
        return self._holds("interactions")

    @property
    def has_factory(self) -> bool:
        """True if a program makes the data, or some of them."""
        return self._holds("factory")

    @property
    def has_table(self) -> bool:
        """True if the samples, or some of them, are rows of stored tables."""
        return self._holds("table")

    @property
    def is_own(self) -> bool:
        """True if the samples are those of a map-style dataset: of a program or of tables."""
        return self._holds("factory", "table")

    @property
    def factory_text(self) -> str:
        """Program that makes the data, as its key and value."""
        table, source = next(one for one in self.located_sources if one[1].factory)
        return f"{table}.factory = '{source.factory}'"

    @model_validator(mode="after")
    def _check_one_source(self) -> DataSection:
        kinds_of_data = ("path", "text", "sources", "images", "factory")
        given_sources = [k for k in kinds_of_data if getattr(self, k)]
        if len(given_sources) > 1:
            raise ValueError(
                f"give only one of {', '.join(kinds_of_data)} (given: {', '.join(given_sources)})"
            )
        if self.sources and self.columns != ColumnsSection():
            raise ValueError("columns has no effect beside sources: give it in each source")
        if not any(source.is_open_kind for source in self.sources):
            self.check_one_kind()
        if self.bad_data == "substitute" and self.has_text:
            raise ValueError(
                "bad_data = 'substitute' gives a sample another content in its place, but text is packed "
                "into sequences and a document has no place of its own: use 'skip'"
            )
        if self.bad_data == "substitute" and (self.has_table or self.has_interactions):
            raise ValueError("bad_data = 'substitute' applies to images; for other rows use 'skip'")
        has_parts = bool(self.entries) and not (self.is_own or self.has_interactions)
        if self.placement == "parts" and (self.sources or not has_parts):
            raise ValueError("placement = 'parts' needs entries of text or images")
        is_other = self.has_text or self.has_interactions or self.is_own or self.placement == "parts"
        if self.block_samples == "file" and is_other:
            raise ValueError("block_samples = 'file' needs images in files, with placement = 'shared'")
        names = [source.name for source in self.sources]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"names of sources must be unique (given twice: {', '.join(duplicates)})")
        return self

    def check_one_kind(self) -> None:
        """Refuse a mixture of sources of different kinds.

        Raises:
            ValueError: names the sources of each kind.
        """
        kinds: dict[str, list[str]] = {}
        if self.sources and self.has_interactions:
            raise ValueError("interactions do not mix: name all their files in data.path")
        for source in self.sources:
            family = "tables and factories" if source.content in ("table", "factory") else source.content
            kinds.setdefault(family or "", []).append(source.name)
        if len(kinds) > 1:
            shown = ", ".join(f"{kind}: {' '.join(names)}" for kind, names in kinds.items())
            raise ValueError(f"all sources are of one kind, text, images or tables and factories ({shown})")

    @model_validator(mode="after")
    def _check_transforms_of_interactions(self) -> DataSection:
        keys, tables = self.interactions, self.columns.table_names
        for key, patterns in (("hash_rows", keys.hash_rows), ("admit_rows", keys.admit_rows)):
            if unused := [one for one in patterns if not any(fnmatchcase(name, one) for name in tables)]:
                raise ValueError(
                    f"interactions.{key}: '{unused[0]}' matches no field of ids ({', '.join(tables)})"
                )
        both = [name for name in tables if keys.hash_rows_of(name) and keys.admit_rows_of(name)]
        if both:
            raise ValueError(f"interactions.hash_rows and admit_rows both match '{both[0]}': use one of them")
        if not self.columns.dense and (keys.log_dense or keys.missing_dense is not None):
            raise ValueError(
                "interactions.log_dense and missing_dense have no effect without data.columns.dense"
            )
        return self

    @model_validator(mode="after")
    def _check_every_stage_has_a_source(self) -> DataSection:
        stages = [
            source.weight if isinstance(source.weight, list) else [(0, source.weight)]
            for source in self.sources
        ]
        for start in sorted({first for source in stages for first, _ in source}):
            weights = [[weight for first, weight in source if first <= start][-1] for source in stages]
            if not any(weights):
                raise ValueError(f"all sources have weight 0 from sample {start:,} on")
        return self
