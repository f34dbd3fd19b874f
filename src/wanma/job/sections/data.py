"""Section `[data]` of a job file: training data, tokenizer and loader."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.sections.images import ImageTransformSection
from wanma.job.sections.interactions import InteractionsSection
from wanma.job.url_credentials import CREDENTIALS_HINT, has_secret


def _refuse_secrets(locations: list[str]) -> list[str]:
    for location in locations:
        if has_secret(location):  # not repeated in the message
            raise ValueError(f"a URL holds a password or key, which records would show; {CREDENTIALS_HINT}")
    return locations


TextList = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else [] if value is None else value),
    AfterValidator(_refuse_secrets),
]
"""List of texts; a single text is a list of one."""


_SOURCE_KEYS: dict[str, tuple[str, ...]] = {
    "text": ("text_field",),
    "images": ("image_field", "label_field", "class_names"),
    "factory": ("arguments",),
}
"""Kinds of sources, and the keys that are of one kind alone."""


class SourceSection(Section):
    """One source of a weighted mixture."""

    name: str = Field(description="name in reports")
    text: TextList = Field(
        default_factory=list,
        description="files, folders, globs or URLs, as `data.text`; 'stdlib': Python's own source",
    )
    text_field: str | None = Field(None, description="field of its records; default: `data.text_field`")
    images: TextList = Field(
        default_factory=list,
        description="files, folders, globs or URLs, as `data.images`",
    )
    image_field: str | None = Field(
        None, description="field of the image; default: `data.image_transform.image_field`"
    )
    label_field: str | None = Field(
        None, description="field of the class; default: `data.image_transform.label_field`"
    )
    class_names: list[str] = Field(
        default_factory=list,
        description="names of classes that are numbers in the records, in order from 0; sources of images "
        "have the classes of one name in common",
    )
    factory: str | None = Field(
        None, description="'package.module:function' returning a map-style dataset, as `data.factory`"
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")
    weight: Annotated[float, Field(gt=0, le=1e12)] | list[tuple[int, float]] = Field(
        1.0,
        description="share of samples, relative to the other sources; or [[samples, weight], ...]: weight "
        "from so many consumed samples on (curriculum)",
    )

    @model_validator(mode="after")
    def _check_one_kind(self) -> SourceSection:
        kinds = [name for name in _SOURCE_KEYS if getattr(self, name)]
        if len(kinds) != 1:
            given = " and ".join(kinds) or "none"
            raise ValueError(f"the source '{self.name}' needs one of text, images, factory (given: {given})")
        for kind, names in _SOURCE_KEYS.items():
            for name in names:
                if kind != kinds[0] and getattr(self, name):
                    raise ValueError(f"{name} has no effect: the source '{self.name}' holds {kinds[0]}")
        if duplicates := sorted({one for one in self.class_names if self.class_names.count(one) > 1}):
            raise ValueError(f"class_names has {', '.join(duplicates)} twice")
        return self

    @model_validator(mode="after")
    def _check_weight_stages(self) -> SourceSection:
        if not isinstance(self.weight, list):
            return self
        starts = [first for first, _ in self.weight]
        if not starts or starts[0] != 0:
            raise ValueError(f"weight must begin with sample 0 (given: {starts})")
        if any(later <= earlier for earlier, later in itertools.pairwise(starts)) or starts[-1] > 2**62:
            raise ValueError(f"the samples of weight must rise, up to 2**62 (given: {starts})")
        weights = [weight for _, weight in self.weight]
        if not all(0 <= weight <= 1e12 for weight in weights) or not any(weights):
            raise ValueError(f"each weight must be from 0 to 1e12, and one above 0 (given: {weights})")
        return self


class DataSection(Section):
    """Training data: text, images, or a custom dataset."""

    text: TextList = Field(
        default_factory=list,
        description="files, folders, globs, fsspec URLs of plain text, records (JSON lines, Parquet and "
        "others) or tokens (Megatron, numpy); 'stdlib': Python's own source",
    )
    text_field: str = Field(
        "text",
        min_length=1,
        description="field of records that holds the text or token ids, such as 'meta.text'",
    )
    sources: list[SourceSection] = Field(
        default_factory=list,
        description="weighted mixture of sources, all of one kind: text, images or factory",
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
    interaction_log: TextList = Field(
        default_factory=list,
        description="files, folders, globs or URLs of rows of user, item, rating or click, and time: CSV, "
        "TSV, Parquet and others; or 'synthetic:USERSxITEMSxROWS'",
    )
    interactions: InteractionsSection = Field(
        default_factory=InteractionsSection, description="columns and split of `data.interaction_log`"
    )
    factory: str | None = Field(None, description="'package.module:function' returning a map-style dataset")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")
    tokenizer: str = Field("bytes", description="'bytes', or the path of a Hugging Face tokenizer.json")
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
    block_samples: int = Field(
        1024, ge=1, le=1_000_000_000, description="shuffle = 'block': consecutive samples in a block"
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
        description="largest size in bytes of the copies of remote data in the cache",
    )
    probe_store: bool = Field(
        True,
        description="measure latency and bandwidth of a remote store for forecasts, weekly, by the first "
        "bytes of some files",
    )
    bad_data: Literal["refuse", "skip", "substitute"] | None = Field(
        None,
        description="consequence of damaged files and rows: an error, left out and listed, or (not for text) "
        "another sample; unset: an error, but invalid UTF-8 in plain text becomes U+FFFD",
    )
    bad_data_limit: int = Field(
        100,
        ge=0,
        le=1_000_000_000_000,
        description="damaged files and rows from which on skipping is an error",
    )
    prefetch: int = Field(
        4, ge=1, le=10_000, description="optimizer steps of data loaded ahead of the training loop"
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
        "cores; a dataset of your own is read by one unless worker_processes is set",
    )
    placement: Literal["shared", "parts"] = Field(
        "shared",
        description="shared: all nodes have the same data; parts: each node has some of it, found by the "
        "same entries of `text` or `images`; read there and handed over, in one order over all",
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
    worker_processes: bool = Field(
        False,
        description="loader processes instead of threads, for a dataset whose Python code takes the time",
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
    def has_images(self) -> bool:
        """True if the samples are stored images: those of `images`, or of sources."""
        return bool(self.images) or any(source.images for source in self.sources)

    @property
    def has_text(self) -> bool:
        """True if the section names text: that of `text`, or of sources."""
        return bool(self.text) or any(source.text for source in self.sources)

    @property
    def has_factory(self) -> bool:
        """True if the data are a program: that of `factory`, or those of sources."""
        return self.factory is not None or any(source.factory for source in self.sources)

    @property
    def factory_text(self) -> str:
        """Program that makes the data, as its key and value."""
        if self.factory is not None:
            return f"data.factory = '{self.factory}'"
        return f"data.sources[0].factory = '{self.sources[0].factory}'"

    @model_validator(mode="after")
    def _check_one_source(self) -> DataSection:
        kinds_of_data = ("text", "sources", "images", "interaction_log", "factory")
        given_sources = [k for k in kinds_of_data if getattr(self, k)]
        if len(given_sources) > 1:
            raise ValueError(
                f"give only one of {', '.join(kinds_of_data)} (given: {', '.join(given_sources)})"
            )
        kinds = {kind: [one.name for one in self.sources if getattr(one, kind)] for kind in _SOURCE_KEYS}
        if len(kinds := {kind: names for kind, names in kinds.items() if names}) > 1:
            shown = ", ".join(f"{kind}: {' '.join(names)}" for kind, names in kinds.items())
            raise ValueError(f"all sources are of one kind, text, images or factory ({shown})")
        if self.bad_data == "substitute" and self.has_text:
            raise ValueError(
                "bad_data = 'substitute' gives a sample another content in its place, but text is packed "
                "into sequences and a document has no place of its own: use 'skip'"
            )
        if self.placement == "parts" and (self.sources or self.factory or not (self.text or self.images)):
            raise ValueError("placement = 'parts' needs entries of text or images")
        names = [source.name for source in self.sources]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"names of sources must be unique (given twice: {', '.join(duplicates)})")
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
