"""Conversations as tokens, of which the answers of the assistant alone are targets. No torch here.

In a token file of conversations a token that is no target has the bit `NO_TARGET`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wanma.data.chat.template import ChatTemplate, Message, Span, import_jinja, read_messages
from wanma.job.errors import JobError

NO_TARGET = 1 << 31
TOKEN_DTYPE = np.dtype("<u4")


class ChatTokenizer(Protocol):
    """Tokenizer of conversations; see `Tokenizer`."""

    chat: ChatTemplate | None

    @property
    def special_texts(self) -> Sequence[str]:
        """Texts of special tokens, such as ends of turns."""

    def encode_with_places(self, text: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Encode a text to tokens (tokens,) and the first character and end of each (tokens, 2)."""


def chat_template_of(tokenizer: ChatTokenizer) -> ChatTemplate:
    """Return the chat template of a tokenizer.

    Raises:
        JobError: it has none, or Jinja is not installed.
    """
    if tokenizer.chat is None:
        raise JobError(
            "data.columns.messages: the tokenizer of data.tokenizer has no chat template",
            "name the folder of a chat model's tokenizer, or put chat_template.jinja beside tokenizer.json",
        )
    import_jinja()
    return tokenizer.chat


def encode_conversation(value: Any, tokenizer: ChatTokenizer) -> NDArray[np.uint32]:
    """Encode the messages in a field of a record: a list of {role, content}, or JSON of it.

    Targets are the tokens in `{% generation %}` blocks of the template. Where it has none, they are those of
    each answer with its end of turn; the header of the turn and what follows its end are no targets.

    Raises:
        ValueError: it is no conversation, the template cannot render it, or it holds no answer.
    """
    template, messages = chat_template_of(tokenizer), read_messages(value)
    text, spans = template.render(messages)
    if not template.marks_answers:
        spans = _answer_spans(template, messages, text, tokenizer.special_texts)
    tokens, places = tokenizer.encode_with_places(text)
    is_target = np.zeros(len(tokens), np.bool_)
    for start, end in spans:
        is_target |= (places[:, 1] > start) & (places[:, 0] < end)
    is_target[:1] = False  # nothing in its row comes before it
    if not is_target.any():
        raise ValueError("it holds no answer of the assistant")
    return np.where(is_target, tokens, tokens | NO_TARGET).astype(TOKEN_DTYPE)


def _answer_spans(
    template: ChatTemplate, messages: Sequence[Message], text: str, special_texts: Sequence[str]
) -> list[Span]:
    """Return the answers in a rendered conversation, each with its end of turn.

    An answer begins where the template would let a model begin. Some templates render it in another way once
    more turns follow, without its reasoning for one; then it ends with the first end of turn.
    """
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, _ = template.render(messages[:number], asks=True)
        answered, _ = template.render(messages[: number + 1])
        start, answer = len(prompt), answered[len(prompt) :]
        end_of_turn = max(
            special_texts, key=lambda one: answer.rfind(one) + len(one) * (one in answer), default=""
        )
        has_end = bool(end_of_turn) and end_of_turn in answer
        end = start + (answer.rfind(end_of_turn) + len(end_of_turn) if has_end else len(answer))
        is_located = text.startswith(prompt) and answered.startswith(prompt)
        if is_located and not text.startswith(answered[:end]):
            is_located = has_end and end_of_turn not in str(message.get("content"))
            end = text.find(end_of_turn, start) + len(end_of_turn)
        if not is_located or end <= start:
            raise ValueError(
                f"the answer in its message {number} cannot be located in the text of the chat template; "
                "mark answers there by {% generation %} and {% endgeneration %}"
            )
        spans.append((start, end))
    return spans
