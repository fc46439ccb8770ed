"""Hosts on one machine: network namespaces on a common switch, each with an interface, an address and processes of its own.

    with Hosts(2) as hosts, HostRanks(hosts, ["train.py"], devices=4) as job:
        job.wait(timeout=600)

Programs run in them as on hosts that a network connects, so a job over several hosts can be tried, and its cables taken out, on a laptop.
Needs Linux, the program `ip` and root.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from hoccl_jax.tools import launch

_ETC = pathlib.Path("/etc/netns")  # `ip netns exec NAME` shows /etc/netns/NAME/* as /etc/*


def _ip(*args: str, check: bool = True) -> str:
    return subprocess.run(["ip", *args], check=check, capture_output=True, text=True).stdout


def why_not() -> str | None:
    """Why there can be no hosts here, or None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program `ip` (iproute2) is missing"
    probe = f"hoccl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    _ip("netns", "del", probe, check=False)
    return made.stderr.strip() if made.returncode else None


class Hosts:
    """`count` hosts. A context manager: leaving it removes them. Addresses are 10.77.0.1 and on."""

    def __init__(self, count: int):
        self.count = count
        self._names = [f"hoccl-{os.getpid()}-{i}" for i in range(count)]
        self._switch = f"hoccl-{os.getpid()}-switch"

    def __enter__(self) -> Self:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
            for i, name in enumerate(self._names):
                self._add(i, name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _add(self, i: int, name: str) -> None:
        _ip("netns", "add", name)
        etc = _ETC / name
        etc.mkdir(parents=True, exist_ok=True)
        # XLA's own collectives listen where the machine's name leads to.
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(i)} {socket.gethostname()}\n")
        _ip("link", "add", "eth0", "netns", name, "mtu", "9000", "type", "veth", "peer", "name", f"port{i}", "netns", self._switch)
        _ip("-n", self._switch, "link", "set", f"port{i}", "mtu", "9000", "master", "br0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0", "noprefixroute")
        _ip("-n", name, "link", "set", "eth0", "up")
        # BBR, some systems' default, paces local links.
        route = ["-n", name, "route", "add", "10.77.0.0/24", "dev", "eth0"]
        if subprocess.run(["ip", *route, "congctl", "cubic"], capture_output=True, check=False).returncode:
            _ip(*route)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int) -> list[str]:
        """What to put in front of a command so that it runs on that host."""
        return ["ip", "netns", "exec", self._names[host]]

    def cut(self, host: int) -> None:
        """Takes the host's cable out: nothing goes in or out, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def restore(self, host: int) -> None:
        _ip("-n", self._switch, "link", "set", f"port{host}", "master", "br0")

    def close(self) -> None:
        for name in [*self._names, self._switch]:
            _ip("netns", "del", name, check=False)
            shutil.rmtree(_ETC / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            _ETC.rmdir()  # if nobody else uses it


class HostRanks:
    """A job with the same number of ranks on each host. A context manager, as `launch.Ranks`."""

    def __init__(
        self,
        hosts: Hosts,
        program: Sequence[str],
        *,
        processes_each: int = 1,
        devices: int = 2,
        env: Mapping[str, str] | None = None,
        heartbeat_timeout_s: int = 100,
    ):
        self._each = processes_each
        world = hosts.count * processes_each
        self._ranks: list[launch.Ranks] = []
        try:
            for host in range(hosts.count):
                self._ranks.append(
                    launch.Ranks(
                        program,
                        processes=processes_each,
                        devices=devices,
                        env=env,
                        command=hosts.command(host),
                        coordinator=f"{hosts.address(0)}:4711",
                        first_rank=host * processes_each,
                        world=world,
                        heartbeat_timeout_s=heartbeat_timeout_s,
                    )
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def of(self, rank: int) -> launch.Ranks:
        """The ranks of the host on which `rank` runs."""
        return self._ranks[rank // self._each]

    def wait(self, timeout: float, *, grace_s: float | None = 5.0) -> list[launch.Result]:
        """The results of all ranks, in rank order. LaunchError if any still runs after `timeout` seconds."""
        errors: list[launch.LaunchError] = []

        def wait(ranks: launch.Ranks) -> None:
            try:
                ranks.wait(timeout, grace_s=grace_s)
            except launch.LaunchError as error:
                errors.append(error)

        threads = [threading.Thread(target=wait, args=(ranks,)) for ranks in self._ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results = [result for ranks in self._ranks for result in ranks.results()]
        if errors:
            raise launch.LaunchError(str(errors[0]).splitlines()[0], results)
        return results

    def close(self) -> None:
        for ranks in self._ranks:
            ranks.close()
