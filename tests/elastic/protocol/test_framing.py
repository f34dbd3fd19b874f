from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.elastic.failure import Failure
from wanma.elastic.protocol.framing import (
    MAX_LINE_BYTES,
    MESSAGE_TYPES,
    Framer,
    ProtocolError,
    VersionError,
    compute_proof,
    decode,
    derive_signing_keys,
    encode,
    verify_proof,
)
from wanma.elastic.protocol.local_messages import EventReport
from wanma.elastic.protocol.messages import (
    Challenge,
    CompletionReport,
    FailureReport,
    Heartbeat,
    JoinRequest,
    Message,
    StartCommand,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.one_of(
    st.builds(EventReport, st.dictionaries(st.text(), JSON, max_size=4)),
    *(st.builds(kind) for kind in MESSAGE_TYPES.values() if kind is not EventReport),
)


@given(MESSAGES, st.integers(0, 2**40))
def test_every_message_survives_the_journey(message: Message, generation: int) -> None:
    line = encode(message, generation)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    got_generation, got = decode(line)
    assert got_generation == generation
    assert repr(got) == repr(message)  # NaN is not equal to itself


@given(st.lists(MESSAGES, max_size=5), st.integers(1, 40))
def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(
    messages: list[Message], cut: int
) -> None:
    for keys in (None, (b"one way", b"other way")):
        sender, receiver = Framer(), Framer()
        if keys is not None:
            sender.enable_signing(*keys)
            receiver.enable_signing(keys[1], keys[0])
        data = b"".join(sender.frame(message) for message in messages)
        got = []
        for start in range(0, len(data), cut):
            receiver.feed(data[start : start + cut])
            while (message := receiver.read_message()) is not None:
                got.append(message)
        assert [repr(message) for message in got] == [repr(message) for message in messages]


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(garbage: bytes) -> None:
    framer = Framer()
    framer.feed(garbage + b"\n")
    with pytest.raises(ProtocolError):  # 200 bytes of chance are never a message
        framer.read_message()


@given(
    st.sampled_from(sorted(MESSAGE_TYPES)), st.dictionaries(st.text(max_size=8), JSON, max_size=3), st.data()
)
def test_fields_of_a_wrong_type_are_refused(name: str, extra: dict[str, Any], data: st.DataObject) -> None:
    names = [field.name for field in fields(MESSAGE_TYPES[name])]  # type: ignore[arg-type]
    value = {"v": 4, "g": 0, "kind": name, **extra, **{key: data.draw(JSON) for key in names}}
    try:
        _, message = decode(json.dumps(value).encode())
    except ProtocolError:
        return
    assert type(message) is MESSAGE_TYPES[name]
    decode(encode(message))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"v":6,"g":0,"kind":"StartCommand","generation":1}', "lacks a field"),
        (b'{"v":6,"g":0,"kind":"Heartbeat","more":1}', "unknown fields ['more']"),
        (b'{"v":6,"g":0,"kind":"DrainCommand","exit_code":true}', "DrainCommand.exit_code is not int"),
        (b'{"v":6,"g":0,"kind":"Format","exit_code":1}', "unknown message 'Format'"),
        (b'{"v":6,"g":-1,"kind":"Heartbeat"}', "generation -1"),
        (b'["v"]', "not a message"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_line_is_named(line: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError) as error:
        decode(line)
    assert complaint in str(error.value)


def test_another_version_has_an_error_of_its_own() -> None:
    with pytest.raises(VersionError) as error:
        decode(b'{"v":1,"g":0,"kind":"Heartbeat"}')
    assert str(error.value) == "protocol version 1, this is version 6"


def test_a_line_without_end_is_cut_off_at_the_limit() -> None:
    framer = Framer()
    framer.feed(b"x" * MAX_LINE_BYTES)
    with pytest.raises(ProtocolError):
        framer.feed(b"x")


def test_what_is_too_long_or_no_json_is_refused_before_it_is_sent() -> None:
    for event, fact in (({"text": "x" * MAX_LINE_BYTES}, "over"), ({"tensor": object()}, "JSON")):
        with pytest.raises(ProtocolError, match=fact):
            encode(EventReport(event))


def test_messages_of_another_generation_are_dropped() -> None:
    sender, receiver = Framer(), Framer()
    sender.generation, receiver.generation = 1, 2
    receiver.feed(sender.frame(CompletionReport()) + sender.frame(Heartbeat()))
    sender.generation = 2
    receiver.feed(sender.frame(FailureReport(Failure("now"))))
    assert receiver.read_message() == Heartbeat()
    assert receiver.read_message() == FailureReport(Failure("now"))
    assert receiver.read_message() is None


def test_forged_repeated_and_dropped_lines_are_noticed() -> None:
    def pair() -> tuple[Framer, Framer]:
        sender, receiver = Framer(), Framer()
        sender.enable_signing(b"a", b"b")
        receiver.enable_signing(b"b", b"a")
        return sender, receiver

    sender, receiver = pair()
    line = sender.frame(JoinRequest("job", 1, "host", "10.0.0.1", 1))
    for lines, right in (
        (line.replace(b"host", b"hast"), 0),
        (encode(Heartbeat()), 0),
        (b"0" * 64 + line[64:], 0),
        (line + line, 1),
        (sender.frame(Heartbeat()), 0),
    ):
        _, receiver = pair()
        receiver.feed(lines)
        assert all(receiver.read_message() for _ in range(right))
        with pytest.raises(ProtocolError, match="signature"):
            receiver.read_message()


def test_a_proof_needs_the_secret_the_role_and_both_nonces() -> None:
    challenge = Challenge("theirs")
    good = compute_proof(b"secret", "supervisor", challenge, "mine")
    assert verify_proof(good, b"secret", "supervisor", challenge, "mine")
    assert not verify_proof(good, b"Secret", "supervisor", challenge, "mine")
    assert not verify_proof(good, b"secret", "coordinator", challenge, "mine")
    assert not verify_proof(good, b"secret", "supervisor", Challenge("other"), "mine")
    assert not verify_proof(good, b"secret", "supervisor", challenge, "other")
    assert not verify_proof("\ud800é", b"secret", "supervisor", challenge, "mine")
    one, other = derive_signing_keys(b"secret", challenge, "mine")
    assert one != other


def test_start_is_one_readable_line() -> None:
    start = StartCommand(1, 0, 0, 4, "10.0.0.1", 40000)
    assert encode(start) == (
        b'{"v":6,"g":0,"kind":"StartCommand","generation":1,"node_rank":0,"first_rank":0,'
        b'"world_size":4,"store_host":"10.0.0.1","store_port":40000,"recovery":null,"local_world_sizes":[],'
        b'"plan":null,"forecast":null,"coordinator_node_rank":-1,"failure_unix_seconds":0.0,'
        b'"rank_addresses":[]}\n'
    )
