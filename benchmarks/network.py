"""hoccl_jax between two hosts: against plain TCP, against libfabric's writes alone, and against jax.lax, which uses gloo.

    python -m benchmarks.network                                        # the tables
    python -m benchmarks.network --quick                                # the same with few samples
    python -m benchmarks.network --programs=build/venv/tests --output docs/results/network.md  # and the page, with its plots beside it

The hosts are network namespaces of this machine (`hoccl_jax.tools.hosts`, needs root), each with one process of one CPU device. So both
ends share the machine's cores, and what is compared is software, not network cards. Run it on an otherwise idle machine, from the top of
the repository. libfabric alone and the pipeline need the programs transport_write and staged_pipeline, which a build of the C++ tests
makes (docs/development.md).
"""

from __future__ import annotations

import datetime
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import app, flags
from tabulate import tabulate

from benchmarks import network_cases, report, staged_pipeline
from hoccl_jax.config import Config
from hoccl_jax.tools.hosts import Hosts, why_not

_QUICK = flags.DEFINE_bool("quick", False, "Few samples and sizes.")
_OUTPUT = flags.DEFINE_string("output", None, "Also write the tables, as Markdown with the facts of the run, to this file.")
_PROGRAMS = flags.DEFINE_string(
    "programs", None, "Folder with the programs transport_write and staged_pipeline; without it what they measure is left out."
)

_SIZES = tuple((1 << 20) * 4**i for i in range(5))  # 1 to 256 MiB
_CHUNKS = tuple((64 << 10) * 4**i for i in range(4))  # 64 KiB to 4 MiB
_CPU_BYTES = 256 << 20
_IN_FLIGHT = (1, 2, 4, 8, 16)


def facts(repeats: int) -> str:
    config = Config.from_env()
    run = report.facts(shlex.join(["python", "-m", "benchmarks.network", *sys.argv[1:]]), datetime.date.today(), repeats)
    lines = [
        *run.splitlines()[:3],
        f"- {repeats} samples a cell; in brackets the quartiles",
        "- two network namespaces on one machine, joined by a bridge, MTU 9000; a process with one CPU device in each: all share its cores",
        f"- {config.net_lanes} connections, chunks of {report.size_text(config.net_chunk_bytes)}, {config.net_in_flight} of them in flight",
        "- TCP: as many plain connections. libfabric: writes with notifications alone, the same chunks, by threads that do nothing else",
        "- GB/s: what travels in one direction, while as much travels in the other; of TCP, of libfabric: hoccl's rate in their rates",
        "- TCP / lax: what plain connections gain over lax. Neither TCP nor libfabric copies an all_gather's own part, as the others must",
    ]
    cores = len(os.sched_getaffinity(0))
    if os.getloadavg()[0] > cores / 2:
        lines.append("- **The machine was busy with other work**: the figures scatter, and say little beyond the order of magnitude")
    return "\n".join(lines)


def pipelined(program: str, page: pathlib.Path | None, repeats: int) -> str:
    """The page's section on staged chunks; its picture is written beside the page."""
    overlapped = staged_pipeline.measure(program, staged_pipeline.COSTS_MS, staged_pipeline.PIPELINED, repeats)
    alone = staged_pipeline.measure(program, staged_pipeline.COSTS_MS, staged_pipeline.ALONE, repeats)
    picture = page.with_name(f"{page.stem}-pipeline.png") if page else None
    if picture:
        staged_pipeline.plot(overlapped, alone, picture)
    return staged_pipeline.section(overlapped, alone, picture.name if picture else None)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if reason := why_not():
        raise SystemExit(f"no hosts can be made here: {reason}")
    repeats = 3 if _QUICK.value else 9
    config = Config.from_env()
    run = facts(repeats)  # says what the load was before
    programs = pathlib.Path(_PROGRAMS.value) if _PROGRAMS.value else None
    write = str(programs / "transport_write") if programs else None
    with Hosts(2) as hosts:
        rows = network_cases.compare(hosts, _SIZES[:2] if _QUICK.value else _SIZES, repeats, write)
        small = network_cases.collectives(hosts, network_cases.SMALL, network_cases.OPERATIONS, repeats, {})
        used = network_cases.cpu_seconds(hosts, _CPU_BYTES, 2 if _QUICK.value else 8, write)
        rates = network_cases.sweep(hosts, _CHUNKS[:2] if _QUICK.value else _CHUNKS, _IN_FLIGHT[:2] if _QUICK.value else _IN_FLIGHT, 3)
    table = tabulate([row.cells() for row in rows], network_cases.HEADERS, tablefmt="github", disable_numparse=True)
    title = f"A ppermute of {report.size_text(network_cases.SWEPT)} in GB/s, by size of chunks and how many are in flight:"
    swept = f"{title}\n\n{network_cases.sweep_table(rates)}"
    title = f"CPU time of both hosts together for each GiB that travels, at {report.size_text(_CPU_BYTES)} a rank:"
    details = [
        f"Small operations, time a call ({config.net_posted_bytes} bytes and less travel with the announcement):",
        network_cases.small_table(small),
        f"{title}\n\n{network_cases.cpu_table(used)}",
        swept,
    ]
    page = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
    pipeline = [pipelined(str(programs / "staged_pipeline"), page, 1 if _QUICK.value else 5)] if programs else []
    print("\n\n".join([run, table, *details, *pipeline]))
    if page:
        network_cases.plot(rows, page.with_suffix(".png"))
        picture = f"![Rates over message size]({page.with_suffix('.png').name})"
        page.write_text("\n\n".join(["# Between two hosts", run, table, picture, *details, *pipeline]) + "\n")


if __name__ == "__main__":
    app.run(main)
