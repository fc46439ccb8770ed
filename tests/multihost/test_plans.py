"""Plans between hosts: the values of jax.lax, traces that show stages and both ends of the network, and the errors of direct flows."""

from __future__ import annotations

import pathlib
import re
import signal
from typing import Any

import pytest

from hoccl_jax.tools.hosts import Hosts, why_not
from tests.multihost.jobs import run, start
from tests.multiprocess import jobs
from tests.multiprocess.test_failures import merged
from tests.multiprocess.test_plans import chunks_of

pytestmark = [pytest.mark.any_jax, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]

_BLOCK = 8 << 20  # of a rank


def test_two_hosts_equal_lax_and_their_traces_show_the_stages_and_the_network(tmp_path: pathlib.Path) -> None:
    with Hosts(2) as hosts:
        ranks = run(hosts, "planned", str(tmp_path), env={"HOCCL_SCHEDULE": "plan", "HOCCL_TIMEOUT_S": "60"})
    report: Any
    for (report,) in ranks:
        assert report["wrong"] == []
        assert report["stats"]["plans"]["operations"] == 2 * 2 * 3  # devices of the process, executions, kinds
        assert report["stats"]["failures"] == 0
    # A gathered block goes to the other host once, and is passed on there; what one rank sends to one other goes as it is.
    crosses = {"all_gather": 4 * _BLOCK, "all_to_all": 2 * _BLOCK, "ppermute": 2 * _BLOCK}
    for operation, bytes_over_network in crosses.items():
        chunks = chunks_of(tmp_path, operation, 2)
        ends = {leg: {c["args"]["chunk"]: c for c in chunks if c["cat"] == leg} for leg in ("send", "write")}
        assert sorted(ends["send"]) == sorted(ends["write"])
        assert sum(chunk["args"]["bytes"] for chunk in ends["write"].values()) == bytes_over_network
        for name, sent in ends["send"].items():
            arrived = ends["write"][name]
            for what in ("bytes", "stage", "rail", "flow", "from_device", "to_device"):
                assert sent["args"][what] == arrived["args"][what]
            assert (sent["pid"], sent["args"]["peer"]) == (arrived["args"]["peer"], arrived["pid"])
            assert sent["pid"] != arrived["pid"]
            assert sent["args"]["lane"] in (0, 1)
            assert arrived["ts"] <= sent["ts"]  # asked for before it is sent; hosts on one machine have one clock
        assert {chunk["args"]["rail"] for chunk in ends["write"].values()} == {0, 1}
        if operation == "all_gather":
            assert {chunk["args"]["stage"] for chunk in ends["write"].values()} == {0, 1}
            passed_on = [chunk for chunk in chunks if chunk["cat"] == "relay"]
            assert sum(chunk["args"]["bytes"] for chunk in passed_on) == 4 * _BLOCK


def test_killed_process_is_named_by_every_survivor() -> None:
    env = {"HOCCL_SCHEDULE": "plan", "HOCCL_TIMEOUT_S": "60"}
    with Hosts(3) as hosts, start(hosts, "failures", "killed", "1", devices=1, env=env) as job:
        results = job.wait(jobs.DEADLINE_S, grace_s=None)
    assert [r.returncode for r in results] == [0, -signal.SIGKILL, 0], [r.output for r in results]
    for survivor in (results[0], results[2]):
        facts = merged(jobs.reports(survivor))
        assert re.search(jobs.lost(1), facts["doomed"]["error"])
        assert "process 1 has died" in facts["again"]["error"]
        assert facts["next"]["values"] == [[0.0, 1.0]]
