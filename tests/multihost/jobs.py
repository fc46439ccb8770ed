"""Starts the programs of tests/multiprocess and of this folder over several hosts."""

from __future__ import annotations

from collections.abc import Mapping

from hoccl_jax.tools import launch
from hoccl_jax.tools.hosts import HostRanks, Hosts
from tests.multiprocess import jobs


def start(
    hosts: Hosts, program: str, *args: str, processes_each: int = 1, devices: int = 2, env: Mapping[str, str] | None = None
) -> HostRanks:
    """Starts a program of tests/multiprocess/programs or tests/multihost/programs (`multihost.NAME`) over all hosts."""
    package, _, name = program.rpartition(".")
    module = f"tests.{package or 'multiprocess'}.programs.{name}"
    return HostRanks(
        hosts, ["-m", module, *args], processes_each=processes_each, devices=devices, env={**jobs.environment(), **(env or {})}
    )


def run(
    hosts: Hosts,
    program: str,
    *args: str,
    processes_each: int = 1,
    devices: int = 2,
    env: Mapping[str, str] | None = None,
    deadline_s: float = jobs.DEADLINE_S,
) -> list[list[dict[str, object]]]:
    """As `jobs.run`."""
    with start(hosts, program, *args, processes_each=processes_each, devices=devices, env=env) as ranks:
        results = ranks.wait(deadline_s)
    if any(result.returncode for result in results):
        raise launch.LaunchError(f"{program} {' '.join(args)} failed", results)
    return [jobs.reports(result) for result in results]
