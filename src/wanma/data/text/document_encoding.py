"""Encoding of one document of records: text by the tokenizer, token ids as they are. No torch here."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.documents.rows import Document
from wanma.data.documents.text_files import split_pieces
from wanma.data.formats.format import Lists
from wanma.data.text.tokenizer import Tokenizer


def encode_document(document: Document, tokenizer: Tokenizer) -> Iterator[NDArray[Any]]:
    """Yield the tokens of a document in pieces, without its end of document.

    Raises:
        ValueError: a token id is outside the vocabulary.
    """
    if isinstance(document, bytes):
        for number, piece in enumerate(split_pieces(io.BytesIO(document))):
            yield tokenizer.encode(piece, continues=number > 0)
    elif len(tokens := without_end(document, tokenizer)):
        check_tokens(tokens, tokenizer)
        yield tokens


def encode_lists(
    lists: Lists, tokenizer: Tokenizer
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint64]] | None:
    """Encode documents of token ids at once, as `encode_document` does one; empty ones are left out.

    Returns their tokens with their ends, their lengths and digests; None if there are no ids, they are no
    integers, or one is outside the vocabulary.
    """
    values, bounds = lists
    if not len(values) or values.dtype.kind not in "iu":
        return None
    if not 0 <= int(values.min()) <= int(values.max()) < tokenizer.vocabulary_size:
        return None
    starts, ends = bounds[:-1], bounds[1:]
    has_end = (ends > starts) & (values[ends - 1] == tokenizer.end_of_document_id)
    is_content = np.ones(len(values), np.bool_)
    is_content[ends[has_end] - 1] = False
    ends = ends - has_end
    is_filled = ends > starts
    starts, ends = starts[is_filled], ends[is_filled]
    lengths = ends - starts + 1
    tokens = np.empty(int(lengths.sum()), tokenizer.dtype)
    is_end = np.zeros(len(tokens), np.bool_)
    is_end[np.cumsum(lengths) - 1] = True
    tokens[is_end] = tokenizer.end_of_document_id
    tokens[~is_end] = values[is_content]
    content = values.astype("<u4").data.cast("B")
    ranges = zip((4 * starts).tolist(), (4 * ends).tolist(), strict=True)
    digests = b"".join(_digest(content[start:end]) for start, end in ranges)
    return tokens, lengths, np.frombuffer(digests, "<u8")


def without_end(tokens: NDArray[Any], tokenizer: Tokenizer) -> NDArray[Any]:
    """Return token ids without the end of document that stored documents mostly have."""
    return tokens[:-1] if len(tokens) and int(tokens[-1]) == tokenizer.end_of_document_id else tokens


def check_tokens(tokens: NDArray[Any], tokenizer: Tokenizer, first: int = 0) -> None:
    """Refuse token ids outside the vocabulary.

    Args:
        first: position of the first one in its document.

    Raises:
        ValueError: the message names the first one and its position.
    """
    if int(tokens.min()) >= 0 and int(tokens.max()) < tokenizer.vocabulary_size:
        return
    place = int(np.argmax((tokens < 0) | (tokens >= tokenizer.vocabulary_size)))
    raise ValueError(
        f"the token {int(tokens[place])} at its position {first + place} is outside the vocabulary of "
        f"{tokenizer.vocabulary_size} tokens of data.tokenizer"
    )


def document_digest(document: Document, tokenizer: Tokenizer) -> int:
    """Return the hash of a document's content, which decides its side of the validation split.

    Token ids have the same one in any integer type, with and without their end of document.
    """
    if isinstance(document, bytes):
        content = document
    else:
        content = without_end(document, tokenizer).astype("<u4").tobytes()
    return int.from_bytes(_digest(content), "little")


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()
