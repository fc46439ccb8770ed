"""The samples of a benchmark, and what people read of them: the table with its targets, the Markdown page and the plot."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import statistics
from collections.abc import Mapping, Sequence

from tabulate import tabulate

LARGE = 64 << 20  # bytes

# (layout, operation) -> how many times faster than jax.lax a large message shall be, with tuned malloc.
_LARGE_TARGETS = {
    ("1x4", "all_gather"): 1.0,
    ("1x4", "all_to_all"): 3.0,
    ("1x4", "ppermute"): 1.0,
    ("2x1", "all_gather"): 1.3,
    ("2x1", "all_to_all"): 3.0,
    ("2x1", "ppermute"): 1.5,
    ("2x2", "all_gather"): 3.0,
    ("2x2", "all_to_all"): 3.0,
    ("2x2", "ppermute"): 1.5,
}
_SMALL_TARGET = 1.0  # any layout, any operation, 16 B


@dataclasses.dataclass(frozen=True)
class Samples:
    """Times in seconds, in the order of measurement: the i-th ones of the two implementations and of memcpy are neighbours in time.

    `memcpy` copies what all ranks of the operation receive together; it is empty for small messages, where it says nothing.
    """

    operation: str
    size: int
    hoccl: list[float]
    lax: list[float]
    memcpy: list[float]


def size_text(size: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[0], quartiles[2]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    layout: str
    malloc: str
    samples: Samples

    @property
    def speedup(self) -> float:
        """Ratio of the medians, jax.lax to hoccl_jax."""
        return statistics.median(self.samples.lax) / statistics.median(self.samples.hoccl)

    @property
    def target(self) -> float | None:
        if self.samples.size == LARGE:
            return _LARGE_TARGETS.get((self.layout, self.samples.operation)) if self.malloc == "tuned" else None
        return _SMALL_TARGET

    def cells(self) -> list[str]:
        s = self.samples
        low, high = spread([lax / hoccl for lax, hoccl in zip(s.lax, s.hoccl, strict=True)])
        share = f"{statistics.median(s.memcpy) / statistics.median(s.hoccl):.0%}" if s.memcpy else ""
        verdict = "" if self.target is None else "met" if self.speedup >= self.target else "missed"
        return [
            self.layout,
            self.malloc,
            s.operation,
            size_text(s.size),
            _milliseconds(s.hoccl),
            _milliseconds(s.lax),
            f"{self.speedup:.2f} ({low:.2f}..{high:.2f})",
            _milliseconds(s.memcpy) if s.memcpy else "",
            share,
            "" if self.target is None else f"{self.target:g}",
            verdict,
        ]


def _milliseconds(seconds: Sequence[float]) -> str:
    low, high = spread(seconds)
    return f"{statistics.median(seconds) * 1e3:.3g} ({low * 1e3:.3g}..{high * 1e3:.3g})"


_HEADERS = ["layout", "malloc", "operation", "bytes/rank", "hoccl ms", "lax ms", "lax / hoccl", "memcpy ms", "share", "target", "verdict"]


def table(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.target is not None]
    met = sum(row.speedup >= row.target for row in judged if row.target is not None)
    text = tabulate([row.cells() for row in rows], _HEADERS, tablefmt="github", disable_numparse=True)
    return f"{text}\n\n{met} of {len(judged)} targets met."


def facts(command: str, date: datetime.date, repeats: int) -> str:
    """What one must know to read, or repeat, the run: Markdown."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy"))
    lines = [
        f"- {date.isoformat()}, `{command}`",
        f"- Python {platform.python_version()}, {versions}, {platform.system()} {platform.release()}",
        f"- {cpu_model()}, {len(os.sched_getaffinity(0))} cores; load average before the run {os.getloadavg()[0]:.1f}",
        f"- {repeats} samples a cell; in brackets the quartiles (of the pairwise ratios for lax / hoccl)",
        "- layout: processes x devices in each; bytes/rank: of the result for all_gather, of the operand otherwise",
        "- memcpy: all cores copy as many bytes as all ranks receive, between buffers in use before; share: its median over hoccl's. The",
        "  sources of an all_gather are read several times, partly from caches, so that its share may exceed 100 %",
    ]
    return "\n".join(lines)


def cpu_model() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def page(run_facts: str, results: str, picture: str | None) -> str:
    parts = ["# Collectives on CPU devices: hoccl_jax against jax.lax", run_facts, results]
    if picture:
        parts.append(f"![Time over message size with tuned malloc]({picture})")
    return "\n\n".join(parts) + "\n"


def plot(sweep: Mapping[str, Sequence[Samples]], path: pathlib.Path) -> None:
    """Median time over message size: a row of panels per layout, a panel per operation, quartiles as bands."""
    import matplotlib  # here: the table alone needs no plotting library

    matplotlib.use("Agg")
    from matplotlib import pyplot

    operations = list(dict.fromkeys(s.operation for samples in sweep.values() for s in samples))
    figure, panels = pyplot.subplots(
        len(sweep), len(operations), figsize=(4 * len(operations), 3 * len(sweep)), sharex=True, squeeze=False, layout="constrained"
    )
    for (layout, samples), row in zip(sweep.items(), panels, strict=True):
        for operation, panel in zip(operations, row, strict=True):
            cases = [s for s in samples if s.operation == operation]
            for name in ("hoccl", "lax", "memcpy"):
                points = [(s.size, getattr(s, name)) for s in cases if getattr(s, name)]
                sizes = [size for size, _ in points]
                low, high = zip(*(spread(times) for _, times in points), strict=True)
                panel.plot(
                    sizes, [statistics.median(times) * 1e3 for _, times in points], label=name, linestyle="--" if name == "memcpy" else "-"
                )
                panel.fill_between(sizes, [t * 1e3 for t in low], [t * 1e3 for t in high], alpha=0.2)
            panel.set(xscale="log", yscale="log", title=f"{operation}, {layout}", xlabel="bytes/rank", ylabel="ms")
    panels[0][0].legend()
    figure.savefig(path)
