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
