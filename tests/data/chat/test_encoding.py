"""Tokens and targets of conversations, beside `transformers` and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.chats import CHATML, TEMPLATES, conversations, write_tokenizer
from wanma.data.chat.encoding import NO_TARGET, chat_template_of, encode_conversation
from wanma.data.text.tokenizer import BytesTokenizer, load_tokenizer
from wanma.job.errors import JobError

HISTORY = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "easy"},
    {"role": "user", "content": "é万?"},
    {"role": "assistant", "content": " 马 ", "tool_calls": None},
]


def encode(folder: Path, messages: Any) -> tuple[list[int], list[bool]]:
    tokens = encode_conversation(messages, load_tokenizer(folder))
    return (tokens & (NO_TARGET - 1)).tolist(), (tokens < NO_TARGET).tolist()


def target_text(folder: Path, messages: Any) -> str:
    """Return the text of the targets; runs are separated by a bar."""
    tokens, is_target = encode(folder, messages)
    backend = load_tokenizer(folder)._backend  # type: ignore[attr-defined]  # its text with special tokens
    edges = np.flatnonzero(np.diff(np.array([False, *is_target, False]).astype(int))).reshape(-1, 2)
    return "|".join(backend.decode(tokens[start:end], skip_special_tokens=False) for start, end in edges)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [HISTORY, *conversations(3)], ids=["history", "0", "1", "2"])
def test_a_conversation_has_the_tokens_that_transformers_gives_it(
    name: str, messages: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, TEMPLATES[name])
    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    expected = reference.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, is_target = encode(folder, messages)
    assert tokens == expected["input_ids"]
    if name == "marked":
        assert is_target == [bool(one) for one in expected["assistant_masks"]]
    assert chat_template_of(load_tokenizer(folder)).render(messages[:1], asks=True)[0] == (
        reference.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "4<|im_end|>| 马 <|im_end|>"),
        ("marked", "4</s>|马</s>"),
        ("reasoning", "4<|im_end|>|<think><think> 马 <|im_end|>"),
        ("llama", " 4 </s>|  马  </s>"),
    ],
)
def test_targets_are_the_answers_with_their_ends_of_turn(name: str, expected: str, tmp_path: Path) -> None:
    end = "</s>" if name in ("marked", "llama") else "<|im_end|>"
    assert target_text(write_tokenizer(tmp_path, TEMPLATES[name], end), HISTORY) == expected


def test_a_template_without_ends_of_turns_has_the_whole_answers_as_targets(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert target_text(write_tokenizer(tmp_path, template), HISTORY) == "4\n| 马 \n"


def test_text_of_json_and_arrays_of_mappings_are_conversations(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    expected = encode(folder, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    text = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": null}]'
    assert encode(folder, text) == encode(folder, text.encode()) == expected
    array = np.array([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], object)
    assert encode(folder, array) == expected


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "no JSON",
        ["text"],
        [{"content": "no role"}],
        [{"role": "user", "content": "no answer"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": object()}, {"role": "assistant", "content": "a"}],
    ],
)
def test_what_is_no_conversation_with_an_answer_is_a_bad_row(messages: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"."):
        encode(write_tokenizer(tmp_path), messages)


def test_answers_that_cannot_be_located_are_refused_not_guessed(tmp_path: Path) -> None:
    template = "{{ messages | length }}" + CHATML  # each prefix of a conversation has another beginning
    with pytest.raises(ValueError, match="generation"):
        encode(write_tokenizer(tmp_path, template), HISTORY)


def test_a_template_reaches_neither_the_day_nor_pythons_internals(tmp_path: Path) -> None:
    for number, expression in enumerate(("strftime_now('%d')", "''.__class__.__mro__", "messages.append(1)")):
        folder = write_tokenizer(tmp_path / str(number), "{{ " + expression + " }}" + CHATML)
        with pytest.raises(ValueError, match="chat template"):
            encode(folder, HISTORY)


def test_a_tokenizer_without_a_template_is_refused_by_its_key(tmp_path: Path) -> None:
    for tokenizer in (BytesTokenizer(), load_tokenizer(write_tokenizer(tmp_path, None))):
        with pytest.raises(JobError, match=r"data\.tokenizer"):
            chat_template_of(tokenizer)


def test_a_saved_tokenizer_keeps_its_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "given"))
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.fingerprint == tokenizer.fingerprint
    assert saved.chat.fingerprint == tokenizer.chat.fingerprint


def test_the_file_of_a_template_goes_before_that_in_the_settings(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "unused")
    (folder / "chat_template.jinja").write_text(CHATML)
    found = load_tokenizer(folder / "tokenizer.json").chat
    assert found.source == CHATML
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
