"""Functions that the lab's tests run on hosts; the standard library only."""

import os
import socket
import threading
import time
from pathlib import Path

from benchmarks.lab.hosts import Host

PORT = 7801
_count = 0


def _counted() -> None:
    global _count
    _count += 1


def calls(host: Host) -> int:
    _counted()
    return _count


def who(host: Host) -> dict:
    """Say what this host takes itself for."""
    return dict(
        name=socket.gethostname(),
        group=host.group,
        addresses=host.addresses,
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(),
        host1=socket.gethostbyname("host1"),
        interfaces=sorted(os.listdir("/sys/class/net")),
    )


def stream(host: Host, *, peer: int, rail: int, megabytes: int) -> dict | None:
    """Send bytes from host 0 to another, over one rail; the receiver says how long it took."""
    _counted()
    size = megabytes * 2**20
    if host.rank == peer:
        with socket.create_server((host.addresses[rail], PORT)) as server:
            connection, _ = server.accept()
            with connection:
                left, began = size, None
                while left:
                    got = len(connection.recv(min(left, 1 << 16)))
                    assert got, "the sender left"
                    began = began or time.perf_counter()
                    left -= got
                connection.sendall(b"!")
            return {"seconds": time.perf_counter() - began}
    if host.rank == 0:
        source, goal = (host.addresses[rail], 0), (f"10.77.{rail}.{peer + 1}", PORT)
        with _connected(goal, source) as connection:
            connection.sendall(bytes(size))
            assert connection.recv(1) == b"!"
    return None


def reaches(host: Host, *, peer: int, within_s: float) -> bool:
    """Say whether a message to a peer is answered."""
    if host.rank == peer:
        threading.Thread(target=_echo, args=(host, within_s + 1.0)).start()
        return _answers(host.addresses[0], within_s)
    time.sleep(0.2)
    return _answers(f"10.77.0.{peer + 1}", within_s)


def _echo(host: Host, seconds: float) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host.addresses[0], PORT + 1))
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                _, sender = server.recvfrom(8)
            except TimeoutError:
                return
            server.sendto(b"!", sender)


def _answers(address: str, within_s: float) -> bool:
    end = time.monotonic() + within_s
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(0.1)
        while time.monotonic() < end:
            try:
                client.sendto(b"?", (address, PORT + 1))
                return client.recv(8) == b"!"
            except OSError:  # nobody answered yet, or nobody listens there yet
                continue
    return False


def _connected(goal: tuple, source: tuple) -> socket.socket:
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(goal, source_address=source, timeout=30)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.02)


def fails(host: Host, *, on: int) -> None:
    if host.rank == on:
        raise ValueError("not here")
    time.sleep(30)


def dies(host: Host, *, on: int) -> None:
    if host.rank == on:
        os._exit(3)
    time.sleep(30)


def sleeps(host: Host, *, seconds: float) -> None:
    time.sleep(seconds)
