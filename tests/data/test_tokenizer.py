"""Tokenizers: bytes, and Hugging Face files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from wanma.data.text.tokenizer import BytesTokenizer, load_tokenizer
from wanma.job.errors import JobError


def byte_level(path: Path, special: list[str], vocabulary: int = 300) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat " * 20], trainer)
    backend.save(str(path))
    return path


@given(st.binary())
def test_bytes_round_trip(raw: bytes) -> None:
    tokens = BytesTokenizer().encode(raw)
    assert tokens.tolist() == list(raw)
    assert BytesTokenizer().decode([*tokens, 256]) == raw.decode("utf-8", errors="replace")


def test_bytes_have_an_end_of_document_and_257_tokens() -> None:
    assert (BytesTokenizer().vocabulary_size, BytesTokenizer().end_of_document_id) == (257, 256)


@given(text=st.text())
def test_a_file_round_trips(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    if not path.exists():
        byte_level(path, ["<|endoftext|>"])
    tokenizer = load_tokenizer(path)
    tokens = tokenizer.encode(text.encode("utf-8", errors="replace"))
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens) == text.encode("utf-8", errors="replace").decode()


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>"])
def test_the_end_of_document_is_found_by_its_common_names(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path / "t.json", ["<pad>", name]))
    assert tokenizer.end_of_document_id == 1
    assert tokenizer.decode([1]) == ""


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "<stop>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<stop>", "special": True}}),
        ("special_tokens_map.json", {"eos_token": "<stop>"}),
        ("generation_config.json", {"eos_token_id": [2, 0]}),
        ("config.json", {"eos_token_id": 2}),
    ],
)
def test_the_files_beside_a_tokenizer_name_its_end_of_document(
    tmp_path: Path, file: str, content: dict[str, object]
) -> None:
    path = byte_level(tmp_path / "tokenizer.json", ["<pad>", "</s>", "<stop>"])
    unnamed = load_tokenizer(path)
    assert unnamed.end_of_document_id == 1
    (tmp_path / file).write_text(json.dumps(content))
    for place in (path, tmp_path):
        tokenizer = load_tokenizer(place)
        assert (tokenizer.end_of_document_id, tokenizer.end_of_document) == (2, "<stop>")
        assert tokenizer.fingerprint != unnamed.fingerprint
    (tmp_path / file).write_text(json.dumps({"eos_token": "<unknown>", "eos_token_id": 9_999}))
    assert load_tokenizer(path).fingerprint == unnamed.fingerprint


def test_the_template_of_a_tokenizer_names_its_end_of_document(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "t.json", ["<begin>", "<stop>"])
    backend = Backend.from_file(str(path))
    backend.post_processor = processors.TemplateProcessing(
        single="<begin> $A <stop>", special_tokens=[("<begin>", 0), ("<stop>", 1)]
    )
    backend.save(str(path))
    assert load_tokenizer(path).end_of_document_id == 1


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")])),
        (normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), None),
        (normalizers.Prepend("\u2581"), pre_tokenizers.Metaspace(prepend_scheme="never")),
        (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ],
)
def test_pieces_of_a_document_have_the_tokens_of_the_whole(
    tmp_path: Path, normalizer: Any, pre_tokenizer: Any
) -> None:
    characters = {
        character: number for number, character in enumerate(sorted({*"\u2581\u0120\u010a\nthecat "}))
    }
    backend = Backend(models.BPE(vocab=characters, merges=[]))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    pieces = [tokenizer.encode("the\n"), tokenizer.encode("cat at\n", continues=True)]
    assert np.concatenate(pieces).tolist() == tokenizer.encode("the\ncat at\n").tolist()
    assert len(tokenizer.encode("the")) == 4  # with its space


def test_the_faster_encoding_gives_the_same_tokens_and_starts_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # and restored at the end
    path = byte_level(tmp_path / "t.json", ["<|endoftext|>"])
    exact, fast = load_tokenizer(path), load_tokenizer(path)
    threads = len(list(Path("/proc/self/task").iterdir()))
    fast.speed_up()
    for text in ("", "the cat", " sat<|endoftext|>on\n\n", "万马 🐎", b"\xff the " * 500):
        for continues in (False, True):
            expected = exact.encode(text, continues=continues)
            found = fast.encode(text, continues=continues)
            assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
    assert len(list(Path("/proc/self/task").iterdir())) == threads


def test_a_tokenizer_without_an_end_of_document_gets_one(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "t.json", [])
    known = len(json.loads(path.read_text())["model"]["vocab"])
    tokenizer = load_tokenizer(path)
    assert (tokenizer.end_of_document_id, tokenizer.vocabulary_size) == (known, known + 1)
    assert tokenizer.decode([*tokenizer.encode(b"cat"), known]) == "cat"
    published = Backend.from_str(tokenizer.to_huggingface_json())
    assert published.token_to_id(tokenizer.end_of_document) == known


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "t.json", ["<pad>"])
    backend = Backend.from_file(str(path))
    plain = len(backend.encode("the cat " * 50).ids)
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(path))
    assert len(load_tokenizer(path).encode(b"the cat " * 50)) == plain > 8
    assert len(load_tokenizer(path).encode(b"t")) == 1


def test_large_vocabularies_use_four_bytes(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({f"w{n}": n for n in range(70_000)}, unk_token="w0"))
    backend.save(str(tmp_path / "t.json"))
    assert load_tokenizer(tmp_path / "t.json").dtype == np.uint32


def test_what_is_saved_loads_as_the_same_tokenizer(tmp_path: Path) -> None:
    for tokenizer in (BytesTokenizer(), load_tokenizer(byte_level(tmp_path / "t.json", ["</s>"]))):
        folder = tmp_path / tokenizer.fingerprint[:8]
        folder.mkdir()
        tokenizer.save(folder)
        again = load_tokenizer(folder)
        assert type(again) is type(tokenizer)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode(b"the cat").tolist() == tokenizer.encode(b"the cat").tolist()


def test_a_wrong_path_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"tokenizer: '/no/such/.*: no such file"):
        load_tokenizer("/no/such/tokenizer.json")
    with pytest.raises(JobError, match=r"data\.tokenizer: .*no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"not json", b"{}", b'{"model": 3}', b"[1, 2]", b"\xff\xfe\x00"])
def test_a_file_that_is_no_tokenizer_is_refused_by_its_key(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(JobError, match=r"data\.tokenizer: '.*t\.json' is not a"):
        load_tokenizer(tmp_path / "t.json")
