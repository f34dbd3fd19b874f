"""Tokenizers, between text and tokens: plain bytes, or any Hugging Face `tokenizers` file. No torch here."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from wanma.data.stores.filesystems import is_local
from wanma.job.errors import JobError, WanmaError
from wanma.job.retry import STORAGE_RETRY_POLICY, retry

_TOKENIZER_FILE = "tokenizer.json"
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
"""Names of the end-of-document token in published tokenizers; the first that exists is used."""
BYTES_END_OF_DOCUMENT = "<|endoftext|>"
"""Name of the end-of-document token in the file of the bytes tokenizer."""


class Tokenizer(ABC):
    """Tokenizer: converts text to tokens and back."""

    vocabulary_size: int
    """Vocabulary size; every token is below it."""
    end_of_document_id: int
    """Token that follows every document."""
    needs_utf8: bool
    """True if bytes that are not UTF-8 are replaced by U+FFFD before encoding."""
    fingerprint: str
    """Hash of the content: equal for equal tokenizers."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest dtype that holds every token."""
        return np.dtype("<u2" if self.vocabulary_size <= 1 << 16 else "<u4")

    @abstractmethod
    def encode(self, text: bytes | str) -> NDArray[Any]:
        """Encode a piece of text to tokens of `dtype`, without special tokens around them."""

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
    needs_utf8 = False
    fingerprint = "bytes"

    def encode(self, text: bytes | str) -> NDArray[Any]:
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
    """Tokenizer from a Hugging Face `tokenizers` JSON file, with any algorithm."""

    needs_utf8 = True

    def __init__(self, content: str) -> None:
        from tokenizers import Tokenizer as Backend  # imported on use: other tokenizers need not pay for it

        self._content = content
        self._backend: Any = Backend.from_str(content)
        self._backend.no_truncation()  # a document is never cut or padded, whatever the file was saved with
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("its vocabulary is empty")
        self._backend_vocabulary_size = max(vocabulary.values()) + 1
        end_of_document_ids = [vocabulary[name] for name in _END_OF_DOCUMENT_NAMES if name in vocabulary]
        self.end_of_document_id = (
            end_of_document_ids[0] if end_of_document_ids else self._backend_vocabulary_size
        )
        self.vocabulary_size = max(self._backend_vocabulary_size, self.end_of_document_id + 1)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def encode(self, text: bytes | str) -> NDArray[Any]:
        content = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        # one text at a time: `encode_batch` starts a thread pool, which a later fork would not survive
        encoded = self._backend.encode(content, add_special_tokens=False)
        return np.array(encoded.ids, dtype=self.dtype)

    def decode(self, tokens: Iterable[int]) -> str:
        text_tokens = [
            int(token)
            for token in tokens
            if token < self._backend_vocabulary_size and token != self.end_of_document_id
        ]
        text: str = self._backend.decode(text_tokens, skip_special_tokens=False)
        return text

    def to_huggingface_json(self) -> str:
        return self._content

    def save(self, folder: Path) -> None:
        (folder / _TOKENIZER_FILE).write_text(self._content, encoding="utf-8")


def _byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level vocabularies (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def load_tokenizer(name: str | Path, key: str = "data.tokenizer") -> Tokenizer:
    """Load a tokenizer: 'bytes', the path or URL of a tokenizer.json, or a folder that holds one.

    Raises:
        JobError: no such file, or not a tokenizer; names `key`.
        WanmaError: the file cannot be read.
    """
    if name == "bytes":
        return BytesTokenizer()
    content = _read(str(name), key)
    if content.strip() == _BYTES_TOKENIZER_CONTENT:
        return BytesTokenizer()
    try:
        json.loads(content)
        return HuggingFaceTokenizer(content)
    except Exception as error:  # the backend raises plain `Exception` for unusable files
        raise JobError(
            f"{key}: '{name}' is not a Hugging Face tokenizer.json: {error}",
            "use the tokenizer.json of the model's repository",
        ) from error


def _read(name: str, key: str) -> str:
    try:
        filesystem, path = fsspec.core.url_to_fs(name)

        def fetch() -> bytes:
            file = f"{path.rstrip('/')}/{_TOKENIZER_FILE}" if filesystem.isdir(path) else path
            content: bytes = filesystem.cat_file(file)
            return content

        return (fetch() if is_local(filesystem) else retry(fetch, STORAGE_RETRY_POLICY)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise JobError(f"{key}: '{name}' is not a tokenizer.json: it is binary") from error
    except (FileNotFoundError, ImportError, ValueError) as error:
        cause = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise JobError(f"{key}: '{name}': {cause}", "give 'bytes' or the path of a tokenizer.json") from error
    except OSError as error:
        raise WanmaError(f"{key}: cannot read '{name}': {error.strerror or error}") from error
