"""hoccl_jax between two hosts: against plain TCP, against libfabric's writes alone, and against jax.lax, which uses gloo.

    python -m benchmarks.network                                        # the tables
    python -m benchmarks.network --quick                                # the same with few samples
    python -m benchmarks.network --output docs/results/network.md       # and the page, with its plots beside it

The hosts are network namespaces of this machine (`hoccl_jax.tools.hosts`, needs root), each with one process of one CPU device. So both
ends share the machine's cores, and what is compared is software, not network cards. Run it on an otherwise idle machine, from the top of
the repository. libfabric alone needs the program transport_write, which a build of the C++ tests makes (docs/development.md).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from absl import app, flags
from tabulate import tabulate
from tqdm import tqdm

from benchmarks import report
from benchmarks.report import Samples
from hoccl_jax.config import Config
from hoccl_jax.tools.hosts import HostRanks, Hosts, why_not

_QUICK = flags.DEFINE_bool("quick", False, "Few samples and sizes.")
_OUTPUT = flags.DEFINE_string("output", None, "Also write the tables, as Markdown with the facts of the run, to this file.")
_WRITE = flags.DEFINE_string("transport_write", None, "The program transport_write; without it libfabric's column stays empty.")

_PORT = 4712
_OPERATIONS = ("all_gather", "ppermute")
_SIZES = tuple((1 << 20) * 4**i for i in range(5))  # 1 to 256 MiB
_CHUNKS = tuple((64 << 10) * 4**i for i in range(4))  # 64 KiB to 4 MiB
_IN_FLIGHT = (1, 2, 4, 8, 16)
_SWEPT = 64 << 20  # bytes
# A large result's fresh pages would dominate (benchmarks.cpu).
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_ARENA_MAX": "1"}

Times = Mapping[int, list[float]]  # seconds, by bytes that travel each way


@dataclasses.dataclass(frozen=True)
class Row:
    """An operation of one size, and what else sends as many bytes."""

    samples: Samples
    tcp: list[float]
    libfabric: list[float]

    def cells(self) -> list[str]:
        s = self.samples
        ours = statistics.median(s.hoccl)
        share = f"{statistics.median(self.tcp) / ours:.0%}"
        of_libfabric = f"{statistics.median(self.libfabric) / ours:.0%}" if self.libfabric else ""
        travel = travelling(s.operation, s.size)
        return [
            s.operation,
            report.size_text(s.size),
            *(_rate(times, travel) for times in (s.hoccl, s.lax, self.tcp, self.libfabric)),
            f"{statistics.median(s.lax) / ours:.2f}",
            share,
            of_libfabric,
        ]


_HEADERS = ["operation", "bytes/rank", "hoccl GB/s", "lax GB/s", "TCP GB/s", "libfabric GB/s", "hoccl / lax", "of TCP", "of libfabric"]


def travelling(operation: str, size: int) -> int:
    """Bytes that travel each way between two ranks, in an operation of `size` bytes a rank (as benchmarks.collectives counts them)."""
    return size // 2 if operation == "all_gather" else size


def _rate(seconds: Sequence[float], travel: int) -> str:
    """Gigabytes a second and direction: the median, and the quartiles."""
    if not seconds:
        return ""
    low, high = report.spread(seconds)
    return f"{travel / statistics.median(seconds) / 1e9:.2f} ({travel / high / 1e9:.2f}..{travel / low / 1e9:.2f})"


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    here = str(pathlib.Path(__file__).parents[1])
    return {**_MALLOC, **settings, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}


def collectives(hosts: Hosts, sizes: Sequence[int], operations: Sequence[str], repeats: int, settings: Mapping[str, str]) -> list[Samples]:
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "samples.json"
        program = ["-m", "benchmarks.collectives", f"--sizes={','.join(map(str, sizes))}", f"--repeats={repeats}", f"--output={output}"]
        program += [f"--operation={operation}" for operation in operations]
        with HostRanks(hosts, program, devices=1, env=environment(settings)) as job:
            results = job.wait(1800)
        if any(result.returncode for result in results):
            raise SystemExit("\n".join(result.output for result in results))
        return [Samples(**case) for case in json.loads(output.read_text())]


def _times(output: str) -> Times:
    return {int(size): [float(second) for second in seconds] for size, *seconds in map(str.split, output.splitlines())}


def raw_tcp(hosts: Hosts, sizes: Sequence[int], connections: int, repeats: int) -> Times:
    def command(host: int, peer: str) -> list[str]:
        numbers = [_PORT, connections, repeats, *sizes]
        return [*hosts.command(host), sys.executable, "-m", "benchmarks.raw_tcp", peer, hosts.address(host), *map(str, numbers)]

    env = {**os.environ, **environment({})}
    with subprocess.Popen(command(0, ""), env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()  # it listens
        client = subprocess.run(command(1, hosts.address(0)), env=env, capture_output=True, text=True, timeout=600, check=True)
    return _times(client.stdout)


def libfabric(hosts: Hosts, sizes: Sequence[int], config: Config, repeats: int) -> Times:
    """Nothing without the program."""
    if not _WRITE.value:
        return {}
    numbers = [config.net_lanes, config.net_chunk_bytes, config.net_in_flight, repeats, *sizes]
    ends = [
        subprocess.Popen(
            [*hosts.command(host), _WRITE.value, hosts.address(host), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    addresses = []
    for end in ends:
        assert end.stdout is not None
        addresses.append(end.stdout.readline())
    outputs = []
    for end, address in zip(ends, reversed(addresses), strict=True):
        assert end.stdin is not None
        end.stdin.write(address)
        end.stdin.flush()
    for end in ends:
        output, _ = end.communicate(timeout=600)
        if end.returncode:
            raise SystemExit(f"transport_write failed with {end.returncode}")
        outputs.append(output)
    return _times(outputs[0])


def compare(hosts: Hosts, sizes: Sequence[int], repeats: int) -> list[Row]:
    config = Config.from_env()
    samples = collectives(hosts, sizes, _OPERATIONS, repeats, {})
    travel = sorted({travelling(s.operation, s.size) for s in samples})
    tcp = raw_tcp(hosts, travel, config.net_lanes, repeats)
    writes = libfabric(hosts, travel, config, repeats)
    return [
        Row(s, tcp[travelling(s.operation, s.size)], writes.get(travelling(s.operation, s.size), []))
        for s in sorted(samples, key=lambda s: (_OPERATIONS.index(s.operation), s.size))
    ]


def sweep(hosts: Hosts, chunks: Sequence[int], in_flight: Sequence[int], repeats: int) -> dict[tuple[int, int], float]:
    """Median GB/s and direction of a large ppermute, by bytes of a chunk and chunks in flight."""
    rates = {}
    for chunk in tqdm(chunks, unit="chunk size", disable=None):
        for count in in_flight:
            settings = {"HOCCL_NET_CHUNK_BYTES": str(chunk), "HOCCL_NET_IN_FLIGHT": str(count)}
            (samples,) = collectives(hosts, [_SWEPT], ["ppermute"], repeats, settings)
            rates[chunk, count] = _SWEPT / statistics.median(samples.hoccl) / 1e9
    return rates


def sweep_table(rates: Mapping[tuple[int, int], float]) -> str:
    counts = sorted({count for _, count in rates})
    chunks = sorted({chunk for chunk, _ in rates})
    rows = [[report.size_text(chunk), *(f"{rates[chunk, count]:.2f}" for count in counts)] for chunk in chunks]
    return tabulate(rows, ["chunk", *(f"{count} in flight" for count in counts)], tablefmt="github", disable_numparse=True)


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Rates over message size, a panel for each operation."""
    import matplotlib  # here: the tables alone need no plotting library

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(_OPERATIONS), figsize=(5 * len(_OPERATIONS), 3.5), sharey=True, layout="constrained")
    for operation, panel in zip(_OPERATIONS, panels, strict=True):
        cases = [row for row in rows if row.samples.operation == operation]
        series = {
            "hoccl": [row.samples.hoccl for row in cases],
            "lax (gloo)": [row.samples.lax for row in cases],
            "TCP": [row.tcp for row in cases],
            "libfabric": [row.libfabric for row in cases],
        }
        for name, times in series.items():
            points = [
                (row.samples.size, travelling(operation, row.samples.size) / statistics.median(t) / 1e9)
                for row, t in zip(cases, times, strict=True)
                if t
            ]
            if points:
                panel.plot(*zip(*points, strict=True), label=name, marker="o", linestyle="-" if name == "hoccl" else "--")
        panel.set(xscale="log", title=operation, xlabel="bytes/rank", ylabel="GB/s and direction")
    panels[0].legend()
    figure.savefig(path)


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
    ]
    cores = len(os.sched_getaffinity(0))
    if os.getloadavg()[0] > cores / 2:
        lines.append("- **The machine was busy with other work**: the figures scatter, and say little beyond the order of magnitude")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if reason := why_not():
        raise SystemExit(f"no hosts can be made here: {reason}")
    repeats = 3 if _QUICK.value else 9
    run = facts(repeats)  # says what the load was before
    with Hosts(2) as hosts:
        rows = compare(hosts, _SIZES[:2] if _QUICK.value else _SIZES, repeats)
        rates = sweep(hosts, _CHUNKS[:2] if _QUICK.value else _CHUNKS, _IN_FLIGHT[:2] if _QUICK.value else _IN_FLIGHT, 3)
    table = tabulate([row.cells() for row in rows], _HEADERS, tablefmt="github", disable_numparse=True)
    swept = f"A ppermute of {report.size_text(_SWEPT)} in GB/s, by size of chunks and how many are in flight:\n\n{sweep_table(rates)}"
    print(f"{run}\n\n{table}\n\n{swept}")
    if _OUTPUT.value:
        page = pathlib.Path(_OUTPUT.value)
        plot(rows, page.with_suffix(".png"))
        picture = f"![Rates over message size]({page.with_suffix('.png').name})"
        page.write_text("\n\n".join(["# Between two hosts", run, table, picture, swept]) + "\n")


if __name__ == "__main__":
    app.run(main)
