"""Framing of the elastic protocol: newline-delimited JSON, versioned, limited, typed and signed.

A message of `messages` or `local_messages` is one line `{"v": version, "g": generation, "kind": name,
...fields}`. This module holds framing and keys only, pure: bytes in, messages out. Malformed input raises
`ProtocolError`, and the owner of the connection ends it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import secrets
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, Union

from wanma.elastic.protocol import local_messages, messages
from wanma.elastic.protocol.messages import Challenge, Message

PROTOCOL_VERSION = 6
MESSAGE_TYPES: dict[str, type[Message]] = {
    name: kind
    for module in (messages, local_messages)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Message) and is_dataclass(kind)
}
"""Message types by name."""
MAX_LINE_BYTES = 1 << 20
"""Most bytes of one message; a longer one ends the connection."""
_MAC_LENGTH = 64


class ProtocolError(Exception):
    """Error for input that is no message of this protocol."""


class VersionError(ProtocolError):
    """Error for a message of another version of this protocol."""


# Framing -------------------------------------------------------------------------------------------


def encode(message: Message, generation: int = 0) -> bytes:
    """Encode a message as one line.

    Raises:
        ProtocolError: the line would be longer than `MAX_LINE_BYTES`, or a value is no JSON.
    """
    value = {"v": PROTOCOL_VERSION, "g": generation, "kind": type(message).__name__, **_to_json(message)}
    try:
        line = json.dumps(value, separators=(",", ":"), allow_nan=True).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be sent as JSON: {error}") from error
    if len(line) > MAX_LINE_BYTES - _MAC_LENGTH - 1:
        raise ProtocolError(
            f"{type(message).__name__} of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}"
        )
    return line


def decode(line: bytes) -> tuple[int, Message]:
    """Decode one line to (generation, message).

    Raises:
        ProtocolError: the line is no message of this protocol.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {line[:60]!r}") from error
    if not isinstance(value, dict) or "kind" not in value:
        raise ProtocolError(f"not a message: {line[:60]!r}")
    if value.get("v") != PROTOCOL_VERSION:
        raise VersionError(f"protocol version {value.get('v')!r}, this is version {PROTOCOL_VERSION}")
    generation, name = value.pop("g", None), value.pop("kind")
    del value["v"]
    if type(generation) is not int or generation < 0:
        raise ProtocolError(f"generation {generation!r} is not a count")
    kind = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"unknown message {str(name)[:60]!r}")
    message: Message = _from_json(kind, value, kind.__name__)
    return generation, message


class Framer:
    """Framer of one connection: bytes to messages and back; pure, without a socket.

    After `enable_signing`, every line carries an HMAC over a counter and its text, so that nobody on the
    path can forge, drop, repeat or reorder lines unnoticed.
    """

    def __init__(self) -> None:
        self.generation = 0
        """Current generation, set by the owner; scoped messages of another one are dropped."""
        self.received_count = 0
        """Number of received messages with `Message.is_acknowledged`, dropped ones included."""
        self._buffer = bytearray()
        self._keys: tuple[bytes, bytes] | None = None
        self._signed_count = self._verified_count = 0

    def enable_signing(self, send_key: bytes, receive_key: bytes) -> None:
        """Sign from the next line on, in both directions."""
        self._keys = (send_key, receive_key)

    def frame(self, message: Message, generation: int | None = None) -> bytes:
        """Return a message as one line; `generation`: its own, if it is not the current one."""
        generation = self.generation if generation is None else generation
        line = encode(message, generation if message.is_generation_scoped else 0)
        if self._keys is None:
            return line
        mac = _line_mac(self._keys[0], self._signed_count, line)
        self._signed_count += 1
        return mac + b" " + line

    def feed(self, data: bytes) -> None:
        """Add received bytes.

        Raises:
            ProtocolError: a line grows past the limit.
        """
        self._buffer += data
        if len(self._buffer) > MAX_LINE_BYTES and self._buffer.find(b"\n", 0, MAX_LINE_BYTES) < 0:
            raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes")

    def read_message(self) -> Message | None:
        """Return the next whole message of the current generation; None if more bytes are needed.

        Messages come one at a time, because one may change what follows (`enable_signing`, `generation`).
        """
        while (end := self._buffer.find(b"\n")) >= 0:
            if end >= MAX_LINE_BYTES:
                raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes")
            line = bytes(self._buffer[: end + 1])
            del self._buffer[: end + 1]
            if self._keys is not None:
                line = self._verified(line, self._keys[1])
            generation, message = decode(line)
            self.received_count += message.is_acknowledged
            if not message.is_generation_scoped or generation == self.generation:
                return message
        return None

    def _verified(self, line: bytes, key: bytes) -> bytes:
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, _line_mac(key, self._verified_count, text)):
            raise ProtocolError("a line with a wrong signature")
        self._verified_count += 1
        return text


def _line_mac(key: bytes, count: int, line: bytes) -> bytes:
    return hmac.new(key, b"%d " % count + line, hashlib.sha256).hexdigest().encode()


# Authentication ------------------------------------------------------------------------------------


def new_nonce() -> str:
    return secrets.token_hex(16)


def compute_proof(secret: bytes, role: str, challenge: Challenge, nonce: str) -> str:
    """Return the proof that the caller has the secret, for two nonces; the secret itself is never sent."""
    return hmac.new(secret, f"{role} {challenge.nonce} {nonce}".encode(), hashlib.sha256).hexdigest()


def verify_proof(received_proof: str, secret: bytes, role: str, challenge: Challenge, nonce: str) -> bool:
    return hmac.compare_digest(
        received_proof.encode(errors="replace"), compute_proof(secret, role, challenge, nonce).encode()
    )


def derive_signing_keys(secret: bytes, challenge: Challenge, nonce: str) -> tuple[bytes, bytes]:
    """Return the signing keys of this connection: (supervisor's, coordinator's)."""
    return (
        compute_proof(secret, "lines from supervisor", challenge, nonce).encode(),
        compute_proof(secret, "lines from coordinator", challenge, nonce).encode(),
    )


# Dataclasses to JSON and back ----------------------------------------------------------------------


def _to_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return value


@functools.cache
def _field_hints(kind: type) -> dict[str, Any]:
    """Return types by field name; cached, because resolving them takes longer than reading a message."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _from_json(hint: Any, value: Any, location: str) -> Any:
    """Convert `value` to the type of `hint`: dataclass, tuple, dict, union with None, or plain type."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        return None if value is None else _from_json(kinds[0], value, location)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{location} is not a list")
        return tuple(_from_json(typing.get_args(hint)[0], item, location) for item in value)
    if origin is dict:
        inner = typing.get_args(hint)[1]
        if not isinstance(value, dict):
            raise ProtocolError(f"{location} is not an object")
        return value if inner is Any else {k: _from_json(inner, v, location) for k, v in value.items()}
    if is_dataclass(hint):
        return _dataclass_from_json(typing.cast(type, hint), value, location)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ProtocolError(f"{location} is not {hint.__name__}")
    return value


def _dataclass_from_json(kind: type, value: Any, location: str) -> Any:
    if not isinstance(value, dict):
        raise ProtocolError(f"{location} is not an object")
    hints = _field_hints(kind)
    if unknown := set(value) - set(hints):
        raise ProtocolError(f"{location} has unknown fields {sorted(unknown)}")
    try:
        return kind(**{name: _from_json(hints[name], value[name], f"{location}.{name}") for name in value})
    except TypeError as error:
        raise ProtocolError(f"{location} lacks a field: {error}") from error
    except OverflowError as error:
        raise ProtocolError(f"{location} has a number out of range") from error
