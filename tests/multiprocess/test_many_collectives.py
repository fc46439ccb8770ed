"""40 independent collectives in one program over several processes, mixed with XLA's own, in all the ways that data can cross."""

from __future__ import annotations

import pytest

from tests.multiprocess import jobs

_LARGE = 50_000  # with it all_gathers of 3 MiB: chunked, on the copying threads


@pytest.mark.parametrize("cross_memory", ["auto", pytest.param("off", marks=pytest.mark.any_jax)])
@pytest.mark.parametrize(
    ("processes", "devices", "sizes"),
    [
        (2, 1, {4: 10}),
        (2, 2, {4: 10, _LARGE: 3}),
        (2, 4, {4: 5}),
    ],
)
def test_many_independent_collectives(processes: int, devices: int, sizes: dict[int, int], cross_memory: str) -> None:
    """`sizes`: how often the program runs with how many elements for each pair of ranks."""
    env = {"HOCCL_CROSS_MEMORY": cross_memory, "HOCCL_TIMEOUT_S": "60"}
    arguments = [f"{per_chunk}:{rounds}" for per_chunk, rounds in sizes.items()]
    for reports in jobs.run("many", *arguments, processes=processes, devices=devices, env=env):
        (report,) = reports
        assert report["wrong"] == []
        assert report["stats"]["failures"] == 0
        assert sum(report["stats"]["operations"].values()) >= sum(sizes.values()) * devices * 30  # a group of one rank needs none
