"""The `exec` stream: a process whose input, output and exit code travel over a WebSocket.

https://kubernetes.io/docs/reference/kubectl/ ; channels: kubernetes/kubernetes
staging/src/k8s.io/apimachinery/pkg/util/remotecommand/constants.go ; frames: RFC 6455.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import struct
import subprocess
import threading
from typing import Any

_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255


def serve_exec(handler: Any, process: subprocess.Popen[bytes]) -> None:
    """Connect a process with the client of a request, until it ends or the client is gone."""
    offered = [word.strip() for word in handler.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    chosen = next(word for word in _PROTOCOLS if word in offered)
    key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    handler.send_response(101)
    handler.send_header("Upgrade", "websocket")
    handler.send_header("Connection", "Upgrade")
    handler.send_header(
        "Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    )
    handler.send_header("Sec-WebSocket-Protocol", chosen)
    handler.end_headers()
    handler.close_connection = True
    lock = threading.Lock()

    def send(channel: int, content: bytes, opcode: int = 2) -> None:
        body = bytes([channel]) + content if opcode == 2 else content
        size = len(body)
        head = bytes([0x80 | opcode, size]) if size < 126 else struct.pack("!BBH", 0x80 | opcode, 126, size)
        if size >= 1 << 16:
            head = struct.pack("!BBQ", 0x80 | opcode, 127, size)
        with lock, contextlib.suppress(OSError):
            handler.wfile.write(head + body)
            handler.wfile.flush()

    def pass_on(channel: int, pipe: Any) -> None:
        while content := pipe.read1(1 << 15):
            send(channel, content)

    def receive() -> None:
        with contextlib.suppress(OSError, ValueError, struct.error):
            while (frame := _frame(handler.rfile)) is not None:
                opcode, content = frame
                if opcode == 8:
                    break
                if opcode == 9:
                    send(0, content, opcode=10)
                elif content[:1] == bytes([_STDIN]) and len(content) > 1:
                    process.stdin.write(content[1:])  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
                elif content[:1] == bytes([_CLOSE]) and content[1:2] == bytes([_STDIN]):
                    process.stdin.close()  # type: ignore[union-attr]
        if process.poll() is None:  # the client is gone
            process.kill()

    threads = [threading.Thread(target=pass_on, args=pair, daemon=True)
               for pair in ((_STDOUT, process.stdout), (_STDERR, process.stderr))]  # fmt: skip
    for thread in threads:
        thread.start()
    threading.Thread(target=receive, daemon=True).start()
    code = process.wait()
    for thread in threads:
        thread.join()
    send(_ERROR, json.dumps(_status(code if code >= 0 else 128 - code)).encode())
    send(0, struct.pack("!H", 1000), opcode=8)


def _status(code: int) -> dict[str, Any]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def _frame(stream: Any) -> tuple[int, bytes] | None:
    """Return opcode and content of the next frame of a client, None at the end."""
    head = stream.read(2)
    if len(head) < 2:
        return None
    size = head[1] & 0x7F
    if size >= 126:
        size = struct.unpack("!H" if size == 126 else "!Q", stream.read(2 if size == 126 else 8))[0]
    mask, content = stream.read(4), stream.read(size)
    whole = int.from_bytes(content, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
    return head[0] & 0x0F, whole.to_bytes(size, "big")
