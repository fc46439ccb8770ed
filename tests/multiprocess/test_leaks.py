"""A job that was killed leaves nothing behind: no process, no file in shared memory, no socket."""

from __future__ import annotations

import os
import pathlib
import re
import select
import signal

import pytest

from tests.multiprocess import jobs

pytestmark = pytest.mark.any_jax

_SHM = pathlib.Path("/dev/shm")


def shm_files_of(pid: int) -> set[pathlib.Path]:
    """Files in /dev/shm that the process has mapped or open, deleted ones included."""
    names = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(os.readlink(fd))
        except FileNotFoundError:  # closed meanwhile
            continue
    return {pathlib.Path(match) for name in names for match in re.findall(r"/dev/shm/\S+", name)}


def listening_sockets_of(pid: int) -> set[str]:
    """Names of the unix sockets that the process has bound."""
    inodes = set()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(fd)))
        except FileNotFoundError:
            continue
    return {fields[7] for fields in unix_sockets() if len(fields) > 7 and fields[6] in inodes}


def unix_sockets() -> list[list[str]]:
    return [line.split() for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]


@pytest.mark.parametrize("cross_memory", ["auto", "off"])
@pytest.mark.parametrize("victims", [(0, 1), (1,)])
def test_killed_job_leaves_nothing_behind(cross_memory: str, victims: tuple[int, ...]) -> None:
    shm_before = set(_SHM.iterdir())
    env = {"HOCCL_CROSS_MEMORY": cross_memory, "HOCCL_TIMEOUT_S": "60"}
    # A survivor's exit waits that long for the dead in jax.distributed's goodbye.
    with jobs.start("endless", processes=2, devices=2, env=env, heartbeat_timeout_s=5) as job:
        for rank in range(2):
            job.expect(rank, '"running"', jobs.DEADLINE_S)
        pids = [job.pid(rank) for rank in range(2)]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        files = set().union(*map(shm_files_of, pids))
        sockets = set().union(*map(listening_sockets_of, pids))
        assert sockets, "the engine's sockets should be visible"
        for victim in victims:
            job.kill(victim, signal.SIGKILL)
        results = job.wait(jobs.DEADLINE_S, grace_s=None)
    # A survivor ends by itself, with the exception of the lost rank.
    assert [r.returncode for r in results if r.rank in victims] == [-signal.SIGKILL] * len(victims)
    for survivor in (r for r in results if r.rank not in victims):
        assert survivor.returncode not in (0, None)
        assert re.search(jobs.lost(1), survivor.output)
    poll = select.poll()
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    assert len(poll.poll(0)) == len(pidfds), "a process is still there"
    for fd in pidfds:
        os.close(fd)
    assert [path for path in files if path.exists()] == []
    assert [path for path in set(_SHM.iterdir()) - shm_before if "hoccl" in path.name] == []
    assert sockets & {fields[7] for fields in unix_sockets() if len(fields) > 7} == set()
