"""Chat tokenizers of bytes and special tokens in folders, and conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from wanma.data.text.tokenizer import BytesTokenizer

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<think>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|assistant|>' }}{% generation %}{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}
{% else %}
{{ '<|user|>' + message['content'] | tojson }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
REASONING = (  # as Qwen3: only the last answer keeps its reasoning
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think>{{ message.reasoning_content or '' }}<think>"
    "{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (  # as the [INST] templates: roles must alternate, an answer ends with the end of text
    "{{ bos_token }}{% set ns = namespace(turns=0) %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (ns.turns % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.turns = ns.turns + 1 %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "reasoning": REASONING, "llama": LLAMA}

Row = list[tuple[int, bool]]
"""Tokens of a row, each with True if it is a target."""


def write_tokenizer(folder: Path, template: str | None = CHATML, end: str = "<|im_end|>") -> Path:
    """Write a tokenizer of bytes with special tokens and a chat template, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    backend: Any = Backend.from_str(BytesTokenizer().to_huggingface_json())
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": end,
        **({} if template is None else {"chat_template": template}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Return conversations of one to three questions, each with an answer."""
    draw = random.Random(seed)
    return [
        [
            message
            for turn in range(draw.randint(1, 3))
            for message in (
                {"role": "user", "content": f"question {number}.{turn} " + "q" * draw.randint(0, 9)},
                {"role": "assistant", "content": f"answer {number}.{turn} é" + "a" * draw.randint(0, 9)},
            )
        ]
        for number in range(count)
    ]


def write_chats(path: Path, chats: Sequence[Any], field: str = "messages") -> Path:
    """Write conversations as JSON lines, and return the file."""
    path.write_text("".join(json.dumps({field: chat}) + "\n" for chat in chats))
    return path


def tokens_of(tokenizer: Any, chat: Sequence[dict[str, str]]) -> Row:
    """The tokens of a conversation in ChatML, by hand."""
    pieces = []
    for message in chat:
        is_answer = message["role"] == "assistant"
        pieces += [
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", is_answer),
            ("\n", False),
        ]
    return [(int(token), told) for text, told in pieces for token in tokenizer.encode(text)]
