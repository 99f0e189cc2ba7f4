"""QEMU's side of its machine protocol (docs/interop/qmp-spec), as far as tests need it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}}, "capabilities": []}}


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\r\n")


def respond(connection: socket.socket, request: dict[str, Any], reply: dict[str, Any]) -> None:
    """An answer bears the id of its request, when that had one."""
    send(connection, {**reply, **{key: value for key, value in request.items() if key == "id"}})


def requests(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Nothing but the end of an object separates requests."""
    heard, decoder = "", json.JSONDecoder()
    while data := connection.recv(65536):
        heard += data.decode()
        while heard.strip():
            try:
                request, end = decoder.raw_decode(heard.lstrip())
            except ValueError:
                break
            heard = heard.lstrip()[end:]
            yield request
