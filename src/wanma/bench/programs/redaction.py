"""Redaction of secrets in what a result stores of a contender: names, commands, settings and errors.

Secrets are found by what stands before them (an option, a variable or a header whose name says so), by their
place in a URL, by the known form of a service's tokens, and as values that a contender was given. A secret
that is none of these, such as a password without a name, is not recognized.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from wanma.job.url_credentials import redact_credentials

REDACTED = "***"
MIN_VALUE_LENGTH = 4
"""Characters from which the value of a secret is searched in an output: shorter ones stand everywhere."""

_PARTS_OF_A_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ANY_PART = re.compile(r".*(?:password|passwd|passphrase|secrets?|credentials?|authorization)|cookie")
_LAST_PART = re.compile(r"(?:.*(?:key|token)|keys|auth|pwd|pat)")
_VALUE = r"""("[^"]*"|'[^']*'|[^\s"',;&|)]+)"""
_OPTION = re.compile(rf"(?<![\w-])(--?[A-Za-z][\w-]*)(\s+)(?!-){_VALUE}")
_ASSIGNMENT = re.compile(rf"""(?<![\w.])(-{{0,2}}[A-Za-z_][\w-]*)(["']?\s*[=:]\s*){_VALUE}""")
_HEADER = re.compile(
    r"""(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|x-[\w-]*(?:key|token))(["']?\s*[:=]\s*["']?)([^"'\n]+)"""
)
_USER = re.compile(r"(\w+://)([^\s/@'\":]*:)?([^\s/@'\"]+)@")
_PLAIN_VALUE = re.compile(r"(?i)[\d.,:\s-]*|true|false|none|null|auto")
_BEARER = re.compile(r"(?i)\b(bearer)(\s+)([\w.~+/=-]{8,})")
_TOKEN_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI and others of its form, Slack, AWS; JSON web tokens."""


def is_secret_name(name: str) -> bool:
    """Return True if the value of an option or variable of this name is probably a secret.

    `--api-key`, `HF_TOKEN` and `dbPassword` are such names; `--max-tokens`, `--tokenizer` and
    `--key-value-heads` are none.
    """
    parts = [part.lower() for part in _PARTS_OF_A_NAME.findall(name)]
    return bool(parts) and (
        any(_ANY_PART.fullmatch(part) for part in parts) or _LAST_PART.fullmatch(parts[-1]) is not None
    )


def shown_value(name: str, value: str) -> str:
    """Return the value of an environment variable as a result has it: numbers of threads, hashes of others.

    Any other value may be a secret, and its hash tells a change.
    """
    if is_secret_name(name):
        return REDACTED
    if name.endswith("NUM_THREADS") and value.isdecimal():
        return value
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:12]}"


def redact_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command without secrets."""
    return tuple(_redact_words(command, []))


def redact_text(text: str, values: Mapping[str, str] | None = None) -> str:
    """Return a text, such as the end of an output, without secrets.

    Args:
        values: texts that replace known secrets, by secret. The longest are replaced first, so that one that
            begins like another leaves nothing of it.
    """
    for value in sorted(values or {}, key=len, reverse=True):
        text = text.replace(value, (values or {})[value])
    return _redact(text, [], is_word=False)


def known_secrets(
    command: Sequence[str], environment: Mapping[str, str], inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the secrets that a contender was given, each with the text that replaces it in an output.

    Args:
        command: command of the contender; its secrets become `***`.
        environment: variables of the contender alone. Any may be a secret; values become `$NAME`, except
            numbers.
        inherited: variables of this process, of which only those count whose name says so.
    """
    found: list[str] = []
    list(_redact_words(command, found))
    values = dict.fromkeys(found, REDACTED)
    values |= {value: f"${name}" for name, value in inherited.items() if is_secret_name(name)}
    values |= {
        value: f"${name}"
        for name, value in environment.items()
        if is_secret_name(name) or not _PLAIN_VALUE.fullmatch(value)
    }
    # An output may have the lines of a certificate with other indentation.
    lines = {line.strip(): text for value, text in values.items() for line in value.splitlines()}
    return {value: text for value, text in (lines | values).items() if len(value) >= MIN_VALUE_LENGTH}


def _redact_words(command: Sequence[str], found: list[str]) -> Iterator[str]:
    """Yield the words of a command without secrets, which are appended to `found`."""
    is_secret = is_program = False
    for word in command:
        option = re.fullmatch(r"-{1,2}[A-Za-z][\w-]*", word)
        is_option = option is not None and is_secret_name(word)
        assignment = re.fullmatch(r"(-{0,2}[A-Za-z_][\w-]*)=(.*)", word, re.DOTALL)
        if is_secret and not is_option:
            found.append(word)
            yield REDACTED
        elif assignment is not None and is_secret_name(assignment[1]) and not is_program:
            found.append(assignment[2])
            yield f"{assignment[1]}={REDACTED}"
        else:
            yield _redact(word, found, is_word=True)
        is_secret, is_program = is_option, re.fullmatch(r"-[a-z]*c", word) is not None  # sh -c, bash -lc


def _redact(text: str, found: list[str], *, is_word: bool) -> str:
    """Return a text without secrets, which are appended to `found`.

    Args:
        text: a word of a command, which may be a program of a shell, or an output.
        is_word: True for a word of a command. In an output, `key` and `token` alone name no secret.
    """

    def replace(is_needed: Callable[[str], bool]) -> Callable[[re.Match[str]], str]:
        def replaced(match: re.Match[str]) -> str:
            if not is_needed(match[1]) or match[3].strip("\"'").startswith(REDACTED):
                return match[0]
            quote = match[3][0] if match[3][0] in "\"'" else ""
            value = match[3].strip("\"'")
            found.extend({value, value.split()[-1]})  # of a header, the last word
            return f"{match[1]}{match[2]}{quote}{REDACTED}{quote}"

        return replaced

    def is_secret(name: str) -> bool:
        return is_secret_name(name) and (is_word or name.lower().strip("-") not in ("key", "token", "auth"))

    def user(match: re.Match[str]) -> str:
        if match[2] is None and not match[1].startswith("http"):
            return match[0]  # a name alone: git@host
        found.append(match[3])
        return f"{match[1]}{REDACTED}@"

    text = redact_credentials(_USER.sub(user, text))
    text = _HEADER.sub(replace(lambda _: True), text)
    text = _OPTION.sub(replace(is_secret), text)
    text = _ASSIGNMENT.sub(replace(is_secret), text)
    text = _BEARER.sub(replace(lambda _: True), text)

    def token(match: re.Match[str]) -> str:
        found.append(match[0])
        return REDACTED

    return _TOKEN_FORMS.sub(token, text)
