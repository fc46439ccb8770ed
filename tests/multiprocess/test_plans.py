"""Operations over several nodes run by the scheduler's plans: same values, visible stages, and the errors of direct flows."""

from __future__ import annotations

import json
import pathlib
import re
import signal
from typing import Any

import pytest

from tests.multiprocess import jobs

pytestmark = pytest.mark.any_jax

_ENV = {"HOCCL_SCHEDULE": "plan", "HOCCL_TIMEOUT_S": "60"}


def chunks_of(folder: pathlib.Path, operation: str, processes: int) -> list[dict[str, Any]]:
    """The chunks in the traces of all processes, by time."""
    events = []
    for process in range(processes):
        events += json.loads((folder / f"{operation}.{process}.json").read_text())["traceEvents"]
    return sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))


def test_two_nodes_equal_lax_and_their_traces_show_the_stages(tmp_path: pathlib.Path) -> None:
    env = {**_ENV, "HOCCL_SCHEDULE": "auto", "TEST_NODES": "2"}
    for reports in jobs.run("planned", str(tmp_path), processes=2, devices=2, env=env):
        (report,) = reports
        assert report["wrong"] == []
        assert report["stats"]["plans"]["operations"] == 2 * 2 * 3  # devices of the process, executions, kinds
        assert report["stats"]["failures"] == 0
    block = 8 << 20
    for operation, arrives, stages in [("all_gather", 4 * 4 * block, 2), ("all_to_all", 4 * block, 1), ("ppermute", 4 * block, 1)]:
        chunks = chunks_of(tmp_path, operation, 2)
        writes = [chunk for chunk in chunks if chunk["cat"] == "write"]
        assert {chunk["args"]["operation"].split(" ")[0] for chunk in chunks} == {operation}
        assert sorted({chunk["args"]["stage"] for chunk in writes}) == list(range(stages))
        assert {chunk["args"]["from_device"] // 2048 != chunk["args"]["to_device"] // 2048 for chunk in writes} == {True}
        arrived = sum(chunk["args"]["bytes"] for chunk in chunks if chunk["cat"] not in ("stage-in", "write"))
        assert arrived == arrives
        for sender in (0, 1):
            for rail in (0, 1):
                nic = [c["args"]["stage"] for c in writes if c["args"]["from_device"] // 2048 == sender and c["args"]["rail"] == rail]
                assert nic
                assert nic == sorted(nic)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("processes", "devices", "nodes", "seed"), [(2, 4, 2, 5), (4, 2, 4, 6), (4, 2, 2, 7)])
def test_random_cases_over_nodes(processes: int, devices: int, nodes: int, seed: int) -> None:
    env = {**_ENV, "TEST_NODES": str(nodes)}
    for reports in jobs.run("equivalence", str(seed), "20", processes=processes, devices=devices, env=env, deadline_s=250):
        (report,) = reports
        assert report["failed"] == {}
        assert report["ran"] == 20


def test_killed_process_is_named_by_every_survivor() -> None:
    with jobs.start("failures", "killed", "1", processes=3, devices=1, env={**_ENV, "TEST_NODES": "3"}) as job:
        results = job.wait(jobs.DEADLINE_S, grace_s=None)
    assert [r.returncode for r in results] == [0, -signal.SIGKILL, 0], [r.output for r in results]
    for survivor in (results[0], results[2]):
        facts = {name: fact for report in jobs.reports(survivor) for name, fact in report.items()}
        assert re.search(jobs.lost(1), facts["doomed"]["error"])
        assert "process 1 has died" in facts["again"]["error"]
        assert facts["next"]["values"] == [[0.0, 1.0]]
