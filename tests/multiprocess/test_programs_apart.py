"""Resharding, exchanges and messages between different programs over several processes, in all the ways that data can cross."""

from __future__ import annotations

import pytest

from tests.multiprocess import jobs


@pytest.mark.parametrize(("processes", "devices", "cross_memory"), [(2, 4, "auto"), (4, 2, "off")])
def test_over_processes(processes: int, devices: int, cross_memory: str) -> None:
    env = {"HOCCL_CROSS_MEMORY": cross_memory, "HOCCL_TIMEOUT_S": "60"}
    for reports in jobs.run("programs_apart", processes=processes, devices=devices, env=env):
        (report,) = reports
        assert report["wrong"] == []
        assert report["stats"]["failures"] == 0
        assert report["stats"]["fallbacks"] == {}


def test_four_programs_learn_what_one_does() -> None:
    """A pipeline whose stages are programs of their own, with send and recv between them, against one program over all devices."""
    reports = [report for (report,) in jobs.run("stages_apart", processes=4, devices=1, env={"HOCCL_TIMEOUT_S": "60"})]
    last = reports[-1]
    assert last["pipelined"] == pytest.approx(last["whole"], rel=1e-5)
    assert last["whole"][-1] < 0.7 * last["whole"][0]
    for stage, report in enumerate(reports):
        assert report["whole"] == last["whole"]
        steps, ends = len(last["whole"]), 1 if stage in (0, 3) else 2
        assert report["stats"]["operations"]["send"] == report["stats"]["operations"]["recv"] == 4 * steps * ends
        assert report["stats"]["fallbacks"] == {}
