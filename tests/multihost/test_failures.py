"""What goes wrong between hosts is an error that names the lost in bounded time, or is survived."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from examples import pipeline_training
from hoccl_jax.tools.hosts import HostRanks, Hosts, why_not
from tests.multihost.jobs import start
from tests.multiprocess import jobs
from tests.multiprocess.test_failures import merged

pytestmark = [pytest.mark.any_jax, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


def test_killed_process_is_named_by_every_survivor_at_once() -> None:
    with Hosts(3) as hosts, start(hosts, "failures", "killed", "1", devices=1, env={"HOCCL_TIMEOUT_S": "60"}) as job:
        results = job.wait(jobs.DEADLINE_S, grace_s=None)
    assert [r.returncode for r in results] == [0, -signal.SIGKILL, 0], [r.output for r in results]
    ranks = [merged(jobs.reports(result)) for result in results]
    for survivor in (ranks[0], ranks[2]):
        # One machine, one clock.
        assert 0 < survivor["doomed"]["at"] - ranks[1]["died_at"] < 2.0
        assert re.search(jobs.lost(1), survivor["doomed"]["error"])
        assert "process 1 has died" in survivor["again"]["error"]
        assert survivor["next"]["values"] == [[0.0, 1.0]]


def test_short_cut_is_survived_and_a_long_one_is_an_error_that_names_the_host() -> None:
    env = {"HOCCL_HEARTBEAT_TIMEOUT_S": "6", "HOCCL_TIMEOUT_S": "60"}
    with Hosts(2) as hosts, start(hosts, "multihost.cut", env=env) as job:
        job.of(0).expect(0, "running", jobs.DEADLINE_S)
        hosts.cut(1)
        time.sleep(0.5)  # how long the cut lasts, not how long anything takes
        hosts.restore(1)
        job.of(0).expect(0, "still running", jobs.DEADLINE_S)
        hosts.cut(1)
        job.of(0).expect(0, "error", jobs.DEADLINE_S)
        job.of(1).expect(1, "error", jobs.DEADLINE_S)
        hosts.restore(1)
        results = job.wait(jobs.DEADLINE_S, grace_s=None)
    for rank, result in enumerate(results):
        lost = merged(jobs.reports(result))["lost"]
        assert lost["rounds"] > 10
        assert f"process {1 - rank} has not been heard of" in lost["error"], lost
        assert lost["seconds"] < 6 + 6


def sockets(pid: int) -> int:
    """How many the process has open."""
    count = 0
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += str(entry.readlink()).startswith("socket:")
    return count


def test_strangers_at_the_port_disturb_nobody() -> None:
    """Garbage, a greeting with a wrong token, and more connections than a process keeps waiting."""
    env = {"HOCCL_NET_PORTS": "40123", "HOCCL_TIMEOUT_S": "60", "HOCCL_HEARTBEAT_TIMEOUT_S": "60"}
    with Hosts(2) as hosts, start(hosts, "multihost.cut", env=env) as job:
        job.of(0).expect(0, "running", jobs.DEADLINE_S)
        victim = job.of(0).pid(0)
        before = sockets(victim)
        assert before > 2  # the process itself, with its connections
        stranger = [*hosts.command(1), sys.executable, "-m", "tests.multihost.programs.stranger", hosts.address(0), "40123"]
        run = subprocess.run(stranger, env={**os.environ, **jobs.environment()}, capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        deadline = time.monotonic() + jobs.DEADLINE_S
        while sockets(victim) > before:  # their ends have to come through
            assert time.monotonic() < deadline, f"{sockets(victim)} sockets are open, {before} were before the strangers"
            time.sleep(0.1)
        job.of(0).kill(0, signal.SIGUSR1)
        job.of(1).kill(1, signal.SIGUSR1)
        job.of(0).expect(0, "ended", jobs.DEADLINE_S)
        results = job.wait(jobs.DEADLINE_S)
    assert [r.returncode for r in results] == [0, 0], [r.output for r in results]


def test_the_example_trains_to_the_same_loss_over_two_hosts() -> None:
    small = ["--layers=8", "--width=32", "--sequence=16", "--microbatches=3", "--microbatch=8", "--log_every=1", "--steps=3"]
    with (
        Hosts(2) as hosts,
        HostRanks(hosts, [pipeline_training.__file__, "--processes=2", *small], devices=4, env=jobs.environment()) as job,
    ):
        results = job.wait(jobs.DEADLINE_S)
    assert [r.returncode for r in results] == [0, 0], [r.output for r in results]
    assert "identical bit for bit over 3 steps" in results[0].output


def test_hosts_are_told_apart_and_the_network_is_used() -> None:
    with Hosts(2) as hosts, start(hosts, "multihost.seen", processes_each=2, devices=1) as job:
        results = job.wait(jobs.DEADLINE_S)
    assert [r.returncode for r in results] == [0] * 4, [r.output for r in results]
    for rank, result in enumerate(results):
        seen = merged(jobs.reports(result))
        assert seen["by_network"] == [process // 2 != rank // 2 for process in range(4)]
        nodes = seen["nodes"]
        assert [node == nodes[rank] for node in nodes] == [process // 2 == rank // 2 for process in range(4)]
        assert "libfabric" in seen["transport"]
        assert seen["bytes"]["nic"] == 2 * 4 * 1000
        assert seen["bytes"]["host"] == 4 * 1000


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"HOCCL_NET_PORTS": str(taken.getsockname()[1])}
        with jobs.start("equivalence", "1", "1", processes=2, devices=1, env=env) as ranks:
            results = ranks.wait(jobs.DEADLINE_S)
    assert all("HOCCL_NET_PORTS" in result.output for result in results)
