"""Values of records for people: their types, and their content as short text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from wanma.data.documents.record_fields import TOKEN_FIELDS
from wanma.data.formats.image_folder import image_format, is_image
from wanma.data.images.transform import unwrap
from wanma.data.text.tokenizer import Tokenizer
from wanma.data.tools.images import image_description, is_picture

_TEXT_FIELDS = ("text", "content", "txt")
_SHOWN_NUMBERS = 16
_SHOWN_TOKENS = 512
_SHOWN_BYTES = 16


def image_bytes(value: Any) -> bytes | None:
    """Return the bytes of a value that may be the file of an image.

    It is bytes, a list of one such, or `{"bytes": ...}`; None: neither.
    """
    try:
        value = unwrap(value)
    except ValueError:
        return None
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else None


def type_name(value: Any) -> str:
    """Return the type of a value, such as 'text', 'JPEG image' or 'array int64 (28, 28)'."""
    if (content := image_bytes(value)) is not None:
        return f"{image_format(content)} image" if is_image(content) else "bytes"
    if isinstance(value, np.ndarray):
        shape = f"({', '.join(map(str, value.shape))})" if value.ndim > 1 else "list"
        return f"{value.dtype.name} {shape}"
    if isinstance(value, bool | np.bool_):
        return "truth value"
    if isinstance(value, int | np.integer):
        return "integer"
    if isinstance(value, float | np.floating):
        return "number"
    names = {str: "text", list: "list", tuple: "list", type(None): "null"}
    return "object" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)


def value_text(name: str, value: Any, tokenizer: Tokenizer | None, limit: int) -> str:
    """Return a value as text of up to about `limit` characters; tokens are decoded, images described.

    Args:
        tokenizer: tokenizer of the tokens; None: unknown.
    """
    if isinstance(value, str):
        return _cut(value, limit)
    if (content := image_bytes(value)) is not None:
        if is_image(content):
            return f"<{image_description(content)}, {len(content):,} bytes>"
        return _bytes_text(content, limit)
    if is_picture(value):
        return f"<pixels {' x '.join(map(str, value.shape))}, {value.min()} to {value.max()}>"
    if is_tokens(name, value):
        shown = np.asarray(value).tolist()
        numbers = _numbers(shown)
        if tokenizer is None:
            return numbers
        inside = [token for token in shown[:_SHOWN_TOKENS] if 0 <= token < tokenizer.vocabulary_size]
        outside = len(shown[:_SHOWN_TOKENS]) - len(inside)
        note = f" ({outside} outside of the vocabulary)" if outside else ""
        return f"{_cut(tokenizer.decode(inside), limit)}{note}\n{numbers}"
    if isinstance(value, np.ndarray):
        return f"<{type_name(value)}> {_numbers(value.reshape(-1).tolist())}"
    return _cut(json.dumps(_without_bytes(value), ensure_ascii=False), limit)


def is_tokens(name: str, value: Any) -> bool:
    """Return True for a list of whole numbers in a field of tokens."""
    if name not in TOKEN_FIELDS:
        return False
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, list) and all(type(one) is int for one in value)


def _without_bytes(value: Any) -> Any:
    """Return a value as JSON has it, with sizes in place of bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Mapping):
        return {str(name): _without_bytes(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_bytes(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return _without_bytes(value.tolist())
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


def text_field(record: Mapping[str, Any]) -> str | None:
    """Return the field that holds the text of a record: by its name, or the only text; None: undecided."""
    texts = [name for name, value in record.items() if isinstance(value, str) and not name.startswith("__")]
    named = [name for name in _TEXT_FIELDS if name in texts]
    return named[0] if named else texts[0] if len(texts) == 1 else None


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text):,} characters)"


def _bytes_text(content: bytes, limit: int) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if content and text.replace("\n", "").replace("\t", "").isprintable():
        return _cut(text, limit)
    more = " ..." if len(content) > _SHOWN_BYTES else ""
    return f"<{len(content):,} bytes: {content[:_SHOWN_BYTES].hex(' ')}{more}>"


def _numbers(values: list[Any]) -> str:
    shown = " ".join(str(one) for one in values[:_SHOWN_NUMBERS])
    return f"[{shown}{f' ... {len(values):,} numbers' if len(values) > _SHOWN_NUMBERS else ''}]"
