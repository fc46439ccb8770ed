"""How staged chunks overlap: each takes given times to copy and on the network, and the whole takes the longer of the two, not the sum.

Runs the program staged_pipeline, which moves chunks through the engine's remote path, over a link and by copy threads that sleep as told.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import subprocess
from collections.abc import Sequence

from tabulate import tabulate

CHUNKS = 48
COSTS_MS = (1, 2, 4, 8)
PIPELINED = 8  # chunks in flight, as by default
ALONE = 1  # each chunk is copied and sent before the next one is begun
_SHOWN = 6  # chunks of the trace in the plot
_STAGES = ("pack", "network", "unpack")


@dataclasses.dataclass(frozen=True)
class Span:
    """What happened to a chunk; seconds from the first beginning."""

    stage: str
    chunk: int
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Case:
    """Chunks whose copy takes `copy` seconds, at each end, and whose way over the network `network`."""

    copy: float
    network: float
    in_flight: int
    seconds: list[float]  # a chunk, on average over the run; one entry for each run
    trace: list[Span]  # of the last run

    def per_chunk(self) -> float:
        return statistics.median(self.seconds)


def parse(output: str) -> list[tuple[float, list[Span]]]:
    """The runs of the program: seconds of the whole, and the trace."""
    runs: list[tuple[float, list[Span]]] = []
    for words in map(str.split, output.splitlines()):
        if len(words) == 1:
            runs.append((float(words[0]), []))
        else:
            stage, chunk, begin, end = words
            runs[-1][1].append(Span(stage, int(chunk), int(begin) * 1e-6, int(end) * 1e-6))
    return runs


def measure(program: str, costs_ms: Sequence[float], in_flight: int, repeats: int, chunks: int = CHUNKS) -> list[Case]:
    pairs = [(copy, network) for copy in costs_ms for network in costs_ms]
    arguments = [f"{round(copy * 1000)}:{round(network * 1000)}" for copy, network in pairs]
    runs = []
    for _ in range(repeats):
        run = subprocess.run([program, str(chunks), str(in_flight), *arguments], capture_output=True, text=True, timeout=600, check=True)
        runs.append(parse(run.stdout))
    return [
        Case(copy / 1e3, network / 1e3, in_flight, [run[i][0] / chunks for run in runs], runs[-1][i][1])
        for i, (copy, network) in enumerate(pairs)
    ]


HEADERS = ["copy ms", "network ms", "longer ms", "sum ms", f"{PIPELINED} in flight ms", f"{ALONE} in flight ms"]


def table(pipelined: Sequence[Case], alone: Sequence[Case]) -> str:
    rows = []
    for case, single in zip(pipelined, alone, strict=True):
        times = [max(case.copy, case.network), case.copy + case.network, case.per_chunk(), single.per_chunk()]
        rows.append([f"{case.copy * 1e3:g}", f"{case.network * 1e3:g}", *(f"{seconds * 1e3:.2f}" for seconds in times)])
    return tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)


def section(pipelined: Sequence[Case], alone: Sequence[Case], picture: str | None) -> str:
    """Markdown for the page."""
    text = (
        f"{CHUNKS} staged chunks through the test double of the network. Copy threads and the link sleep for the given times;\n"
        "shown is the time of the whole for each chunk. Copies into slots and out of slots take equally long."
    )
    parts = ["## Copies and the network overlap", text, table(pipelined, alone)]
    return "\n\n".join([*parts, f"![Staged chunks: time a chunk, and a trace]({picture})"] if picture else parts)


def plot(pipelined: Sequence[Case], alone: Sequence[Case], path: pathlib.Path) -> None:
    """Time a chunk over the network's share for one cost of copies, and the trace of the case in which both take the same time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, lanes) = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    copy = sorted({case.copy for case in pipelined})[-2]
    networks = [case.network * 1e3 for case in pipelined if case.copy == copy]
    curves.plot(networks, [max(copy * 1e3, n) for n in networks], color="grey", label="the longer")
    curves.plot(networks, [copy * 1e3 + n for n in networks], color="grey", linestyle=":", label="the sum")
    for cases, marker in ((pipelined, "o"), (alone, "s")):
        chosen = [case.per_chunk() * 1e3 for case in cases if case.copy == copy]
        curves.plot(networks, chosen, marker=marker, linestyle="none", label=f"{cases[0].in_flight} in flight")
    curves.set(title=f"copies of {copy * 1e3:g} ms a chunk", xlabel="network, ms a chunk", ylabel="measured, ms a chunk", ylim=(0, None))
    curves.legend()
    shown = next(case for case in pipelined if case.copy == case.network == copy)
    for span in shown.trace:
        if span.chunk < _SHOWN:
            row = _STAGES.index(span.stage)
            lanes.barh(row, (span.end - span.begin) * 1e3, left=span.begin * 1e3, color=f"C{span.chunk}", edgecolor="white")
            lanes.text((span.begin + span.end) / 2 * 1e3, row, str(span.chunk), ha="center", va="center", color="white")
    lanes.set(title=f"trace of the first {_SHOWN} chunks, network {copy * 1e3:g} ms", xlabel="ms", yticks=range(3), yticklabels=_STAGES)
    lanes.invert_yaxis()
    figure.savefig(path)
    pyplot.close(figure)
