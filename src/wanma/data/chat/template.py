"""Chat template of a tokenizer: conversations as text, with the answers of the assistant. No torch here.

Templates are rendered as `transformers` renders them (`apply_chat_template`), with one exception: there is no
`strftime_now`, so that a text does not depend on the day. Templates mostly have a date of their own then.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wanma.job.errors import JobError, missing_extra_error

Message = dict[str, Any]
Span = tuple[int, int]
"""First character of a part of a text, and its end."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field of a message's reasoning; a template reads the first, some the second."""


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja template of conversations.

    Args:
        source: the template.
        special_tokens: texts of special tokens that it may use, such as `bos_token`.
    """

    source: str
    special_tokens: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides about a rendered text."""
        content = json.dumps([self.source, dict(self.special_tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def marks_answers(self) -> bool:
        """True if the template itself says which text is generated: `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the parts in `{% generation %}` blocks.

        Args:
            asks: end with the beginning of an answer (`add_generation_prompt`).

        Raises:
            ValueError: the template cannot render them.
        """
        template, tracker = self._compiled
        tracker.blocks, tracker.spans = [], []
        try:
            for block in template.generate(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=asks,
                **self.special_tokens,
            ):
                tracker.blocks.append(block)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template cannot render it: {error}") from error
        return "".join(tracker.blocks), tracker.spans

    @cached_property
    def _compiled(self) -> tuple[Any, Any]:
        return _compile(self.source)


def import_jinja() -> Any:
    """Import Jinja.

    Raises:
        WanmaError: it is not installed; names its extra.
    """
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise missing_extra_error("jinja2", "chat", "data.columns.messages") from error
    return jinja2


def _compile(source: str) -> tuple[Any, Any]:
    """Return the template and the tracker of its `{% generation %}` blocks."""
    jinja2 = import_jinja()

    class GenerationTracker(jinja2.ext.Extension):  # type: ignore[misc, name-defined]  # imported here
        tags = {"generation"}  # noqa: RUF012  # the interface of Jinja
        blocks: list[str]
        spans: list[Span]

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_track")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _track(self, caller: Any) -> str:
            text: str = caller()
            start = sum(map(len, self.blocks))
            self.spans.append((start, start + len(text)))
            return text

    class Namespace(jinja2.utils.Namespace):  # type: ignore[misc, name-defined]
        """Namespace without attributes that lead to Python's internals."""

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes HTML

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTracker, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "namespace": Namespace}
    try:
        template = environment.from_string(source)
    except jinja2.exceptions.TemplateError as error:
        raise JobError(
            f"data.tokenizer: its chat template is damaged: {error}", "correct chat_template.jinja"
        ) from error
    return template, environment.extensions[GenerationTracker.identifier]


def read_messages(value: Any) -> list[Message]:
    """Return the messages in a field of a record: a list of mappings, or JSON of it.

    Fields without a value are left out, as tables fill missing ones with null.

    Raises:
        ValueError: it is no conversation.
    """
    if isinstance(value, bytes | memoryview | str):
        try:
            value = json.loads(bytes(value) if isinstance(value, memoryview) else value)
        except ValueError as error:
            raise ValueError(f"its text is no JSON of messages: {error}") from error
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list) or not value:
        raise ValueError("it is no list of messages {role, content}")
    messages = []
    for one in value:
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise ValueError("one of its messages is no mapping with a role and a content")
        message = {key: _plain(item) for key, item in one.items() if item is not None}
        reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        messages.append(message)
    return messages


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a template must not reach other objects.

    Raises:
        ValueError: JSON has no such value.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise ValueError(f"one of its messages holds a value of type {type(value).__name__}")
