"""Tokenizers, between text and tokens: plain bytes, or any Hugging Face `tokenizers` file. No torch here."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from wanma.data.chat.template import ChatTemplate
from wanma.data.stores.filesystems import is_local
from wanma.job.errors import JobError, WanmaError
from wanma.job.retry import STORAGE_RETRY_POLICY, retry

_TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILE = "tokenizer_config.json"
_SPECIAL_FILE = "special_tokens_map.json"
_CHAT_FILE = "chat_template.jinja"
_END_FILES = {
    _SETTINGS_FILE: "eos_token",
    _SPECIAL_FILE: "eos_token",
    "generation_config.json": "eos_token_id",
    "config.json": "eos_token_id",
}
"""Files beside a tokenizer.json, with their key of the end-of-text token; the first that has it is used."""
_SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
"""Names of special tokens that a chat template may use."""
_BYTES_TOKENIZER_CONTENT = '{"wanma_tokenizer": "bytes"}'
_END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|end_of_document|>",
    "<EOS>",
    "[EOS]",
)
"""Names of the end-of-document token in published tokenizers, where no file names it; the first is used."""
BYTES_END_OF_DOCUMENT = "<|endoftext|>"
"""Name of the end-of-document token in the file of the bytes tokenizer."""


_NO_PREFIX = {"prepend_scheme": "never", "add_prefix_space": False}
"""Settings of a `Metaspace`, by the versions of `tokenizers` that have them."""


class Tokenizer(ABC):
    """Tokenizer: converts text to tokens and back."""

    vocabulary_size: int
    """Vocabulary size; every token is below it."""
    end_of_document_id: int
    end_of_document: str
    needs_utf8: bool
    """True if bytes that are not UTF-8 are replaced by U+FFFD before encoding."""
    fingerprint: str
    """Hash of the content: equal for equal tokenizers."""
    chat: ChatTemplate | None = None
    """Chat template in the files beside it; None: there is none."""
    special_texts: Sequence[str] = ()
    """Texts of special tokens, such as ends of turns."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest dtype that holds every token."""
        return np.dtype("<u2" if self.vocabulary_size <= 1 << 16 else "<u4")

    @abstractmethod
    def encode(self, text: bytes | str, *, continues: bool = False) -> NDArray[Any]:
        """Encode a piece of text to tokens of `dtype`, without special tokens around them.

        Args:
            continues: true if the piece is not the first of its document: no space is put before it.
        """

    def speed_up(self) -> None:
        """Encode faster from now on; for a process of its own, in which settings of libraries may change."""
        return

    def encode_with_places(self, text: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Encode a text, special tokens in it as such, and return each token's first character and end.

        Returns:
            tokens: (tokens,).
            places: (tokens, 2).
        """
        raise TypeError(f"{type(self).__name__} encodes no conversations: {text[:20]}")

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Decode `tokens` to text, without ends of documents; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def to_huggingface_json(self) -> str:
        """Return the content of a Hugging Face `tokenizers` file, tokenizer.json."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the file that `load_tokenizer(folder)` needs."""


class BytesTokenizer(Tokenizer):
    """Tokenizer of bytes: each byte is a token; 256 ends a document."""

    vocabulary_size = 257
    end_of_document_id = 256
    end_of_document = BYTES_END_OF_DOCUMENT
    needs_utf8 = False
    fingerprint = "bytes"

    def encode(self, text: bytes | str, *, continues: bool = False) -> NDArray[Any]:  # noqa: ARG002
        content = text.encode() if isinstance(text, str) else text
        return np.frombuffer(content, dtype=np.uint8).astype(self.dtype)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(int(token) for token in tokens if token < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        (folder / _TOKENIZER_FILE).write_text(_BYTES_TOKENIZER_CONTENT, encoding="utf-8")

    def to_huggingface_json(self) -> str:
        """Return the same tokenizer as a Hugging Face `tokenizers` file: tokens are bytes."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        backend: Any = Backend(models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(BYTES_END_OF_DOCUMENT, special=True, normalized=False)])
        text: str = backend.to_str(pretty=True)
        return text


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer from a Hugging Face `tokenizers` JSON file, with any algorithm.

    Args:
        end: end-of-text token that the files beside it name, as text or number; None: they name none. Where
            the vocabulary has no end-of-text token either, the tokenizer gets one after its last token.
    """

    needs_utf8 = True

    def __init__(self, content: str, end: str | int | None = None, chat: ChatTemplate | None = None) -> None:
        self._content, self.chat, self._is_fast = content, chat, False
        self._backend = _make_backend(content)
        continuation = _without_prefix_space(content)
        self._continuation_backend = self._backend if continuation is None else _make_backend(continuation)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("its vocabulary is empty")
        self._backend_vocabulary_size = max(vocabulary.values()) + 1
        by_name = [vocabulary[name] for name in _END_OF_DOCUMENT_NAMES if name in vocabulary]
        default = by_name[0] if by_name else self._template_end(self._backend_vocabulary_size)
        named = vocabulary.get(end) if isinstance(end, str) else end
        is_known = named is not None and self._backend.id_to_token(named) is not None
        self.end_of_document_id: int = named if named is not None and is_known else default
        self.end_of_document = self._backend.id_to_token(self.end_of_document_id) or BYTES_END_OF_DOCUMENT
        self.vocabulary_size = max(self._backend_vocabulary_size, self.end_of_document_id + 1)
        identity = content if self.end_of_document_id == default else f"{content}\0{self.end_of_document_id}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()

    def _template_end(self, otherwise: int) -> int:
        """Return the special token that the tokenizer's own template puts after a text, or `otherwise`."""
        text, framed = (
            self._backend.encode("a", add_special_tokens=is_framed).ids for is_framed in (False, True)
        )
        return int(framed[-1]) if text and framed[-1] != text[-1] else otherwise

    def encode(self, text: bytes | str, *, continues: bool = False) -> NDArray[Any]:
        content = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        backend = self._continuation_backend if continues else self._backend
        if self._is_fast:  # without the places of tokens, which take a fifth of the time
            (encoding,) = backend.encode_batch_fast([content], add_special_tokens=False)
        else:  # a batch would start a thread pool, which a later fork would not survive
            encoding = backend.encode(content, add_special_tokens=False)
        return np.array(encoding.ids, dtype=self.dtype)

    def speed_up(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a batch starts no thread pool
        self._is_fast = True

    @property
    def special_texts(self) -> Sequence[str]:  # type: ignore[override]  # read when it is wanted
        added = self._backend.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def encode_with_places(self, text: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, tokens: Iterable[int]) -> str:
        text_tokens = [
            int(token)
            for token in tokens
            if token < self._backend_vocabulary_size and token != self.end_of_document_id
        ]
        text: str = self._backend.decode(text_tokens, skip_special_tokens=False)
        return text

    def to_huggingface_json(self) -> str:
        if self.end_of_document_id < self._backend_vocabulary_size:
            return self._content
        from tokenizers import AddedToken

        backend = _make_backend(self._content)
        backend.add_special_tokens([AddedToken(self.end_of_document, special=True, normalized=False)])
        text: str = backend.to_str(pretty=True)
        return text

    def save(self, folder: Path) -> None:
        (folder / _TOKENIZER_FILE).write_text(self._content, encoding="utf-8")
        settings = dict(self.chat.special_tokens) if self.chat is not None else {}
        if self.end_of_document_id < self._backend_vocabulary_size:
            settings["eos_token"] = self.end_of_document
        if settings:
            (folder / _SETTINGS_FILE).write_text(json.dumps(settings), encoding="utf-8")
        if self.chat is not None:
            (folder / _CHAT_FILE).write_text(self.chat.source, encoding="utf-8")


def _make_backend(content: str) -> Any:
    from tokenizers import Tokenizer as Backend  # imported on use: other tokenizers need not pay for it

    backend: Any = Backend.from_str(content)
    backend.no_truncation()  # a document is never cut or padded, whatever the file was saved with
    backend.no_padding()
    return backend


def _without_prefix_space(content: str) -> str | None:
    """Return the tokenizer that puts no space before a text; None: it is this one."""
    values = json.loads(content)
    parts = {key: _without_prefix(values.get(key)) for key in ("normalizer", "pre_tokenizer")}
    return (
        None
        if all(values.get(key) == part for key, part in parts.items())
        else json.dumps({**values, **parts})
    )


def _without_prefix(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer that puts no space before a text; None: nothing is left of it."""
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**part, **{key: value for key, value in _NO_PREFIX.items() if key in part}}
        case {"type": "ByteLevel"}:
            return {**part, "add_prefix_space": False}
        case {"type": "Sequence"}:
            lists = {key: value for key, value in part.items() if isinstance(value, list)}
            return {
                **part,
                **{key: list(filter(None, map(_without_prefix, value))) for key, value in lists.items()},
            }
    return part


def _byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level vocabularies (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load a tokenizer: 'bytes', the path or URL of a tokenizer.json, or a folder that holds one.

    Raises:
        JobError: no such file, or not a tokenizer; names the key `data.tokenizer`.
        WanmaError: the file cannot be read.
    """
    if name == "bytes":
        return BytesTokenizer()
    content = _read(str(name))
    if content.strip() == _BYTES_TOKENIZER_CONTENT:
        return BytesTokenizer()
    beside = _FilesBeside(str(name))
    end, chat = _read_end(beside), _read_chat(beside)
    try:
        json.loads(content)
        return HuggingFaceTokenizer(content, end, chat)
    except Exception as error:  # the backend raises plain `Exception` for unusable files
        raise JobError(
            f"data.tokenizer: '{name}' is not a Hugging Face tokenizer.json: {error}",
            "use the tokenizer.json of the model's repository",
        ) from error


class _FilesBeside:
    """Files beside a tokenizer.json; none where those there may belong to others."""

    def __init__(self, name: str) -> None:
        self._filesystem, path = fsspec.core.url_to_fs(name)
        self._name, self._folder = name, ""
        if self._filesystem.isdir(path):
            self._folder = path.rstrip("/")
        elif path.endswith(f"/{_TOKENIZER_FILE}"):
            self._folder = path.removesuffix(f"/{_TOKENIZER_FILE}")

    def text(self, file: str) -> str | None:
        """Return the content of a file; None: there is none."""
        try:
            content: bytes | None = (
                self._filesystem.cat_file(f"{self._folder}/{file}") if self._folder else None
            )
            return None if content is None else content.decode("utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise JobError(f"data.tokenizer: {file} of '{self._name}' is no UTF-8: {error}") from error
        except OSError as error:
            cause = error.strerror or error
            raise WanmaError(f"data.tokenizer: cannot read {file} of '{self._name}': {cause}") from error

    def values(self, file: str) -> dict[str, Any]:
        """Return the object of JSON in a file; empty: there is none."""
        text = self.text(file)
        try:
            values = {} if text is None else json.loads(text)
        except ValueError as error:
            raise JobError(f"data.tokenizer: {file} of '{self._name}' is not JSON: {error}") from error
        return values if isinstance(values, dict) else {}


def _read_end(beside: _FilesBeside) -> str | int | None:
    """Return the end-of-text token that the files beside a tokenizer.json name; None: none does."""
    for file, end_key in _END_FILES.items():
        end = _token_text(beside.values(file).get(end_key))
        if isinstance(end, str | int):
            return end
    return None


def _read_chat(beside: _FilesBeside) -> ChatTemplate | None:
    """Return the chat template that the files beside a tokenizer.json give; None: none does."""
    settings = beside.values(_SETTINGS_FILE)
    source = beside.text(_CHAT_FILE) or settings.get("chat_template")
    if isinstance(source, list):  # several with names
        named = {one["name"]: one["template"] for one in source if isinstance(one, dict) and "name" in one}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    texts = {**beside.values(_SPECIAL_FILE), **settings}
    special = {name: _token_text(texts.get(name)) for name in _SPECIAL_TOKENS}
    return ChatTemplate(source, {name: text for name, text in special.items() if isinstance(text, str)})


def _token_text(token: Any) -> Any:
    """Return a token in such a file as its text or number."""
    if isinstance(token, dict):
        return token.get("content")
    return token[0] if isinstance(token, list) and token else token


def _read(name: str) -> str:
    try:
        filesystem, path = fsspec.core.url_to_fs(name)

        def fetch() -> bytes:
            file = f"{path.rstrip('/')}/{_TOKENIZER_FILE}" if filesystem.isdir(path) else path
            content: bytes = filesystem.cat_file(file)
            return content

        return (fetch() if is_local(filesystem) else retry(fetch, STORAGE_RETRY_POLICY)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise JobError(f"data.tokenizer: '{name}' is not a tokenizer.json: it is binary") from error
    except (FileNotFoundError, ImportError, ValueError) as error:
        cause = str(error)
        if isinstance(error, FileNotFoundError):
            cause = f"no {_TOKENIZER_FILE} in this folder" if Path(name).is_dir() else "no such file"
        raise JobError(
            f"data.tokenizer: '{name}': {cause}", "give 'bytes' or the path of a tokenizer.json"
        ) from error
    except OSError as error:
        raise WanmaError(f"data.tokenizer: cannot read '{name}': {error.strerror or error}") from error
