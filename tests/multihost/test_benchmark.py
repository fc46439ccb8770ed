"""The network benchmark runs, and counts bytes as it says."""

from __future__ import annotations

import pytest

from benchmarks import network_cases, staged_pipeline
from benchmarks.report import Samples
from hoccl_jax.tools.hosts import Hosts, why_not

pytestmark = pytest.mark.any_jax


def test_rates_are_those_of_one_direction() -> None:
    gather = network_cases.Row(Samples("all_gather", 2_000_000, [0.001] * 3, [0.002] * 3, []), [0.0005] * 3, [])
    assert gather.cells()[2:] == ["1.00 (1.00..1.00)", "0.50 (0.50..0.50)", "2.00 (2.00..2.00)", "", "2.00", "4.00", "50%", ""]
    permute = network_cases.Row(Samples("ppermute", 2_000_000, [0.001] * 3, [0.002] * 3, []), [0.001] * 3, [0.0005] * 3)
    assert permute.cells()[2:] == [
        "2.00 (2.00..2.00)",
        "1.00 (1.00..1.00)",
        *["2.00 (2.00..2.00)", "4.00 (4.00..4.00)"],
        *["2.00", "2.00"],
        "100%",
        "50%",
    ]


@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_every_way_is_measured() -> None:
    with Hosts(2) as hosts:
        rows = network_cases.compare(hosts, [1 << 18], 2)
    assert [(row.samples.operation, row.samples.size) for row in rows] == [("all_gather", 1 << 18), ("ppermute", 1 << 18)]
    for row in rows:
        assert len(row.samples.hoccl) == len(row.samples.lax) == len(row.tcp) == 2
        assert min(row.samples.hoccl + row.samples.lax + row.tcp) > 0


def test_runs_of_the_pipeline_are_read_as_written() -> None:
    (short, trace), (long, nothing) = staged_pipeline.parse("0.25\npack 0 0 1000\nnetwork 0 1000 3000\n0.5\n")
    assert (short, long, nothing) == (0.25, 0.5, [])
    assert trace == [staged_pipeline.Span("pack", 0, 0.0, 0.001), staged_pipeline.Span("network", 0, 0.001, 0.003)]
    cases = [staged_pipeline.Case(0.002, 0.004, n, [0.004 * n] * 3, trace) for n in (1, 2)]
    assert staged_pipeline.table(cases[:1], cases[1:]).splitlines()[2].split("|")[1:-1] == [
        f" {cell} ".ljust(len(head) + 4)
        for cell, head in zip(["2", "4", "4.00", "6.00", "4.00", "8.00"], staged_pipeline.HEADERS, strict=True)
    ]
