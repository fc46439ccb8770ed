"""What benchmarks/network.py measures: operations between two hosts, and what else sends as many bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

from tabulate import tabulate
from tqdm import tqdm

from benchmarks import report
from benchmarks.report import Samples
from hoccl_jax.config import Config
from hoccl_jax.tools.hosts import HostRanks, Hosts

_PORT = 4712
OPERATIONS = ("all_gather", "ppermute")
SWEPT = 64 << 20  # bytes
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
            f"{statistics.median(s.lax) / statistics.median(self.tcp):.2f}",
            share,
            of_libfabric,
        ]


HEADERS = [
    "operation",
    "bytes/rank",
    "hoccl GB/s",
    "lax GB/s",
    "TCP GB/s",
    "libfabric GB/s",
    "hoccl / lax",
    "TCP / lax",
    "of TCP",
    "of libfabric",
]


SMALL = (16, 4 << 10, 64 << 10, 256 << 10)  # bytes/rank
SMALL_HEADERS = ["operation", "bytes/rank", "hoccl us", "lax us", "hoccl / lax"]


def small_table(samples: Sequence[Samples]) -> str:
    def cells(s: Samples) -> list[str]:
        def times(seconds: Sequence[float]) -> str:
            low, high = report.spread(seconds)
            return f"{statistics.median(seconds) * 1e6:.0f} ({low * 1e6:.0f}..{high * 1e6:.0f})"

        ratio = statistics.median(s.lax) / statistics.median(s.hoccl)
        return [s.operation, report.size_text(s.size), times(s.hoccl), times(s.lax), f"{ratio:.2f}"]

    ordered = sorted(samples, key=lambda s: (OPERATIONS.index(s.operation), s.size))
    return tabulate([cells(s) for s in ordered], SMALL_HEADERS, tablefmt="github", disable_numparse=True)


def cpu_table(rows: Sequence[tuple[str, float]]) -> str:
    return tabulate([[name, f"{used:.2f}"] for name, used in rows], ["by", "CPU s/GiB"], tablefmt="github", disable_numparse=True)


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


def libfabric(hosts: Hosts, sizes: Sequence[int], config: Config, repeats: int, program: str | None) -> Times:
    """By the program transport_write; nothing without it."""
    if program is None:
        return {}
    numbers = [config.net_lanes, config.net_chunk_bytes, config.net_in_flight, repeats, *sizes]
    ends = [
        subprocess.Popen(
            [*hosts.command(host), program, hosts.address(host), *map(str, numbers)],
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


def compare(hosts: Hosts, sizes: Sequence[int], repeats: int, transport_write: str | None = None) -> list[Row]:
    config = Config.from_env()
    samples = collectives(hosts, sizes, OPERATIONS, repeats, {})
    travel = sorted({travelling(s.operation, s.size) for s in samples})
    tcp = raw_tcp(hosts, travel, config.net_lanes, repeats)
    writes = libfabric(hosts, travel, config, repeats, transport_write)
    return [
        Row(s, tcp[travelling(s.operation, s.size)], writes.get(travelling(s.operation, s.size), []))
        for s in sorted(samples, key=lambda s: (OPERATIONS.index(s.operation), s.size))
    ]


def cpu_seconds(hosts: Hosts, size: int, calls: int, transport_write: str | None = None) -> list[tuple[str, float]]:
    """CPU seconds, user and system, of both hosts together for each GiB that travels (in either direction), by who moves it."""
    rows = []
    for operation in OPERATIONS:
        for library in ("hoccl", "lax"):
            program = ["-m", "benchmarks.network_load", library, operation, str(size), str(calls)]
            with HostRanks(hosts, program, devices=1, env=environment({})) as job:
                outputs = [result.output for result in job.wait(600)]
            found = [re.search(r"^CPU (\S+)$", output, re.MULTILINE) for output in outputs]
            if not all(found):
                raise SystemExit("\n".join(outputs))
            used = sum(float(match[1]) for match in found if match)
            rows.append((f"{library}, {operation}", used / (2 * calls * travelling(operation, size) / (1 << 30))))
    config = Config.from_env()
    plain: dict[str, Callable[[int], object]] = {"TCP": lambda repeats: raw_tcp(hosts, [size], config.net_lanes, repeats)}
    if transport_write:
        plain["libfabric"] = lambda repeats: libfabric(hosts, [size], config, repeats, transport_write)
    for name, run in plain.items():
        # What starting takes is the same for few and for many.
        few, many = _children_cpu(run, 1), _children_cpu(run, 1 + calls)
        rows.append((name, (many - few) / (2 * calls * size / (1 << 30))))
    return rows


def _children_cpu(run: Callable[[int], object], repeats: int) -> float:
    """CPU seconds of the processes that `run` starts and awaits."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(repeats)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def sweep(hosts: Hosts, chunks: Sequence[int], in_flight: Sequence[int], repeats: int) -> dict[tuple[int, int], float]:
    """Median GB/s and direction of a large ppermute, by bytes of a chunk and chunks in flight."""
    rates = {}
    for chunk in tqdm(chunks, unit="chunk size", disable=None):
        for count in in_flight:
            settings = {"HOCCL_NET_CHUNK_BYTES": str(chunk), "HOCCL_NET_IN_FLIGHT": str(count)}
            (samples,) = collectives(hosts, [SWEPT], ["ppermute"], repeats, settings)
            rates[chunk, count] = SWEPT / statistics.median(samples.hoccl) / 1e9
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

    figure, panels = pyplot.subplots(1, len(OPERATIONS), figsize=(5 * len(OPERATIONS), 3.5), sharey=True, layout="constrained")
    for operation, panel in zip(OPERATIONS, panels, strict=True):
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
