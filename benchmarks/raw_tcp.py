"""Plain TCP between two hosts, both directions at once: `raw_tcp.py PEER_OR_EMPTY OWN_ADDRESS PORT CONNECTIONS REPEATS BYTES...`.

Without a peer it listens. Prints a line for each number of bytes: that number, then the seconds of each exchange of so many bytes each way.
"""

from __future__ import annotations

import socket
import sys
import threading
import time


def connections(peer: str, own: str, port: int, count: int) -> list[socket.socket]:
    sockets = []
    if peer:
        sockets = [socket.create_connection((peer, port), timeout=60) for _ in range(count)]
    else:
        with socket.create_server((own, port)) as listener:
            print("listening", flush=True)
            sockets = [listener.accept()[0] for _ in range(count)]
    for connection in sockets:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def receive(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        got = connection.recv_into(buffer)
        if got == 0:
            raise EOFError("the peer has closed the connection")
        buffer = buffer[got:]


def exchange(sockets: list[socket.socket], sources: list[memoryview], targets: list[memoryview]) -> float:
    sockets[0].sendall(b"x")  # both begin together
    receive(sockets[0], memoryview(bytearray(1)))
    start = time.perf_counter()
    # The calls don't hold the interpreter's lock while data moves.
    threads = [threading.Thread(target=s.sendall, args=(source,)) for s, source in zip(sockets, sources, strict=True)]
    threads += [threading.Thread(target=receive, args=(s, target)) for s, target in zip(sockets, targets, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def main(peer: str, own: str, port: int, count: int, repeats: int, sizes: list[int]) -> None:
    sockets = connections(peer, own, port, count)
    for size in sizes:
        share = size // count
        sources = [memoryview(bytearray(b"\1" * share)) for _ in sockets]
        targets = [memoryview(bytearray(b"\2" * share)) for _ in sockets]
        exchange(sockets, sources, targets)
        print(size, *(exchange(sockets, sources, targets) for _ in range(repeats)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), [int(size) for size in sys.argv[6:]])
