"""Somebody who has no business at a process's port: `stranger.py ADDRESS PORT`. Fails unless all that it does is answered by silence."""

from __future__ import annotations

import os
import socket
import struct
import sys


def connect(where: tuple[str, int]) -> socket.socket:
    return socket.create_connection(where, timeout=20)


def assert_turned_away(where: tuple[str, int], data: bytes) -> None:
    with connect(where) as connection:
        try:
            connection.sendall(data)
            answer = connection.recv(1)
        except (ConnectionResetError, BrokenPipeError):
            answer = b""
        assert answer == b"", answer


def main(address: str, port: int) -> None:
    where = (address, port)
    assert_turned_away(where, b"GET / HTTP/1.1\r\n\r\n")
    assert_turned_away(where, os.urandom(1 << 20) + b"\xff" * 4)
    assert_turned_away(where, struct.pack("II", 0, 0))
    assert_turned_away(where, struct.pack("II", 8, 1 << 20) + b"0" * 8)  # data, from somebody who has not said who it is
    # A greeting that has the right form (csrc/comm/message.h), up to the token.
    text = b"0" * 32 + b"\nhoccl-address-4 1 1 host node socket - 0 0 0 0 0"
    head = struct.pack("IiiiQqQqQQqII", 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, -1, 0, len(text))
    assert_turned_away(where, struct.pack("II", len(head + text), 0) + head + text)
    # The oldest of too many silent ones are turned away; the others stay, and new ones still get in.
    silent = [connect(where) for _ in range(1000)]
    assert silent[0].recv(1) == b""
    assert_turned_away(where, b"\xff" * 8)
    for connection in silent:
        connection.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
