"""Section `[data]` of a job file: training data, tokenizer and loader."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.url_credentials import CREDENTIALS_HINT, has_secret


def _refuse_secrets(locations: list[str]) -> list[str]:
    for location in locations:
        if has_secret(location):  # not repeated in the message
            raise ValueError(f"a URL holds a password or key, which records would show; {CREDENTIALS_HINT}")
    return locations


TextList = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    AfterValidator(_refuse_secrets),
]
"""List of texts; a single text is a list of one."""


class SourceSection(Section):
    """One source of a weighted mixture."""

    name: str = Field(description="name in reports")
    text: TextList = Field(
        min_length=1, description="files, folders, globs or URLs of plain text; 'stdlib': Python's own source"
    )
    weight: float = Field(1.0, gt=0, le=1e12, description="share of samples, relative to the other sources")


class DataSection(Section):
    """Training data: text, images, or a custom dataset."""

    text: TextList = Field(
        default_factory=list,
        description="plain text: files, folders, globs, fsspec URLs; 'stdlib': Python's own source",
    )
    sources: list[SourceSection] = Field(default_factory=list, description="weighted mixture of text sources")
    images: str | None = Field(
        None, description="folder or file of images: MNIST IDX, CIFAR-10 binary, or .npz"
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
    cache: str | None = Field(None, description="folder of token files; default: the user's cache folder")
    prefetch: int = Field(
        4, ge=1, le=10_000, description="optimizer steps of data loaded ahead of the training loop"
    )
    workers: int = Field(1, ge=1, le=1_024, description="loader threads per rank")

    @model_validator(mode="after")
    def _check_one_source(self) -> DataSection:
        given_sources = [k for k in ("text", "sources", "images", "factory") if getattr(self, k)]
        if len(given_sources) > 1:
            raise ValueError(
                f"give only one of text, sources, images, factory (given: {', '.join(given_sources)})"
            )
        names = [source.name for source in self.sources]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"names of sources must be unique (given twice: {', '.join(duplicates)})")
        return self
