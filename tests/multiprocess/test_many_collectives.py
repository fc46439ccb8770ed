"""40 independent collectives in one program over several processes, mixed with XLA's own, in all the ways that data can cross."""

from __future__ import annotations

import pytest

from tests.multiprocess import jobs


@pytest.mark.parametrize("cross_memory", ["auto", "off"])
@pytest.mark.parametrize(
    ("processes", "devices", "rounds", "per_chunk"),
    [
        (2, 1, 10, 4),
        (2, 2, 10, 4),
        (2, 4, 5, 4),
        (2, 2, 3, 50_000),  # all_gathers of 3 MiB: chunked, on the copying threads
    ],
)
def test_many_independent_collectives(processes: int, devices: int, rounds: int, per_chunk: int, cross_memory: str) -> None:
    env = {"HOCCL_CROSS_MEMORY": cross_memory, "HOCCL_TIMEOUT_S": "60"}
    for reports in jobs.run("many", str(rounds), str(per_chunk), processes=processes, devices=devices, env=env):
        (report,) = reports
        assert report["wrong"] == []
        assert report["stats"]["failures"] == 0
        assert sum(report["stats"]["operations"].values()) >= rounds * devices * 30  # a group of one rank needs none
