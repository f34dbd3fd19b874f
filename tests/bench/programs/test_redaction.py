"""Secrets in commands, settings and outputs: what is redacted, and what stays readable."""

from __future__ import annotations

import pytest

from wanma.bench.programs.redaction import is_secret_name, known_secrets, redact_command, redact_text


@pytest.mark.parametrize(
    "name",
    ["--api-key", "--token", "HF_TOKEN", "WANDB_API_KEY", "dbPassword", "--client-secret", "apikey",
     "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "--auth", "OPENAI_API_KEYS", "KEY"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["--tokenizer", "--max-tokens", "--key-value-heads", "--tokens-per-batch", "--author", "--keyframes",
     "-k", "PYTHONPATH", "KeyError", "monkeys-per-tree", ""],
)  # fmt: skip
def test_names_of_settings(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("command", "redacted"),
    [
        (["--api-key", "x", "s3://me:pw@host/b", "-v"], ["--api-key", "***", "s3://***@host/b", "-v"]),
        (["a", "--api-key=x y"], ["a", "--api-key=***"]),
        (["env", "API_KEY=x", "SEED=1", "a"], ["env", "API_KEY=***", "SEED=1", "a"]),
        (["curl", "-H", "Authorization: Bearer x.y"], ["curl", "-H", "Authorization: ***"]),
        (["curl", "--header=X-Api-Key: x"], ["curl", "--header=X-Api-Key: ***"]),
        (["sh", "-c", "KEY=x a --token y --n 3; b"], ["sh", "-c", "KEY=*** a --token *** --n 3; b"]),
        (["sh", "-c", "a --password='x y' > log"], ["sh", "-c", "a --password='***' > log"]),
        (["git", "clone", "https://x@host/a"], ["git", "clone", "https://***@host/a"]),
        (["git", "clone", "ssh://git@host/a"], ["git", "clone", "ssh://git@host/a"]),
        (["a", "https://host/b?sig=x"], ["a", "https://host/b?***"]),
        (["--tokenizer", "gpt2", "--max-tokens", "512"], ["--tokenizer", "gpt2", "--max-tokens", "512"]),
    ],
)  # fmt: skip
def test_a_command_has_no_secrets_and_keeps_its_other_words(command: list[str], redacted: list[str]) -> None:
    assert list(redact_command(command)) == redacted


def test_an_output_has_no_secrets_and_stays_readable() -> None:
    lines = """\
GET https://me:pw@host/a?sig=x failed
{"headers": {"authorization": "Bearer abc.def", "accept": "*/*"}}
api_key: abc, retries=3
login with hf_abcdefghijklmnopqrstuv failed
KeyError: 'loss'
Unexpected key: model.weight, token=17
"""
    assert (
        redact_text(lines)
        == """\
GET https://***@host/a?*** failed
{"headers": {"authorization": "***", "accept": "*/*"}}
api_key: ***, retries=3
login with *** failed
KeyError: 'loss'
Unexpected key: model.weight, token=17
"""
    )


def test_a_secret_that_begins_another_leaves_nothing_of_it() -> None:
    values = {"abcd": "$SHORT", "abcdefgh": "$LONG", "cdefghij": "$LAST"}
    assert redact_text("abcdefgh abcd", values) == "$LONG $SHORT"
    assert redact_text("abcdefgh abcd", dict(reversed(values.items()))) == "$LONG $SHORT"


def test_secrets_are_those_of_the_command_and_the_environment() -> None:
    command = ["a", "--token", "first", "-H", "Authorization: Bearer second", "s3://me:third@host"]
    own = {"API": "fourth", "THREADS": "1024", "FLAG": "True", "CERTIFICATE": "-----BEGIN\nfifth"}
    found = known_secrets(command, own, {"MY_TOKEN": "sixth", "HOME": "/home/me", "SHORT_KEY": "abc"})
    assert found == {
        "first": "***", "Bearer second": "***", "second": "***", "third": "***", "fourth": "$API",
        "-----BEGIN": "$CERTIFICATE", "fifth": "$CERTIFICATE", "-----BEGIN\nfifth": "$CERTIFICATE",
        "sixth": "$MY_TOKEN",
    }  # fmt: skip
