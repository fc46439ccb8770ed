"""What benchmarks/gpu_check.py says of the collectives of several GPUs: lines of numbers, and the tables that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from benchmarks import nvswitch, report

OPERATIONS = ("ppermute", "send", "all_to_all", "all_gather", "broadcast", "ragged_all_to_all")

NOTES = """\
- Chains of dependent operations in one jitted program, ten executions in a row to 1 MiB, four from 8 MiB on, so that dispatch and what the
  ranks begin apart are paid once; medians, hoccl_jax and jax.lax in turns in the same processes. Bytes are those that each rank brings;
  GB/s counts what leaves the busiest GPU. "over": how many times as long the other one takes.
- `send` is a ppermute with the one pair (0, 1), `broadcast` a pbroadcast from rank 0, of jax.lax too (XLA's collective-broadcast, and not a
  psum of masked operands).
- NCCL direct: no JAX, 100 (10 from 256 MiB on) operations in a row on a stream of each GPU, as NCCL is by default. Zero-CTA: with its
  policy of that name and all buffers in symmetric windows. Then all_gather and all_to_all run on copy engines; the other three have no
  such form, and their kernels find registered buffers. "(host)": enqueueing alone took as long, so that NCCL itself may be faster.
- The bare copy is `cuMemcpyAsync` with nothing around it, in the same run, from two GPUs at once, or from one where only one sends.
- Predicted: the simulator's, see [nvswitch](nvswitch.md). "host us": the time of hoccl_jax's handler, which waits up to 10 us for another
  rank's post."""


@dataclasses.dataclass(frozen=True)
class Line:
    """us of one operation of `size` bytes a rank, of which `moved` leave the busiest GPU; None: not measured."""

    operation: str
    size: int
    moved: int
    hoccl: float | None = None
    host: float | None = None
    lax: float | None = None
    nccl: float | None = None
    nccl_enqueue: float | None = None
    zero_cta: float | None = None
    zero_cta_enqueue: float | None = None
    copy: float | None = None
    predicted: float | None = None


def moved(operation: str, size: int, gpus: int) -> int:
    """Bytes that leave the busiest GPU."""
    matrix = nvswitch.bytes_between(operation, size, gpus)
    return int((matrix.sum(axis=1) - matrix.diagonal()).max())


def copy_name(operation: str, size: int, gpus: int) -> str:
    """The bare copy that bounds the operation, as peer_copy.pairs calls it."""
    return f"{'one way' if operation in ('send', 'broadcast') else 'both ways'} {moved(operation, size, gpus)}"


def copied(sizes: Sequence[int], gpus: int) -> list[int]:
    """Bytes of the bare copies that bound the operations, but for the ragged one's odd numbers."""
    return sorted({moved(operation, size, gpus) for operation in OPERATIONS[:-1] for size in sizes})


def lines(chains: Mapping[str, Any], nccl: Mapping[str, Any], limits: Mapping[str, Any], sizes: Sequence[int], gpus: int) -> list[Line]:
    """One for each operation and size of which there is a time."""
    found = []
    for operation in OPERATIONS:
        for size in sizes:
            key = f"{operation} {size}"
            ours, theirs = (chains.get(f"{library} {key}", {}) for library in ("hoccl_jax", "jax.lax"))
            direct, zero = (nccl.get(form, {}) for form in ("default", "zero-CTA"))
            if "us" not in ours and "us" not in theirs and key not in direct and key not in zero:
                continue
            found.append(
                Line(
                    operation,
                    size,
                    moved(operation, size, gpus),
                    hoccl=ours.get("us"),
                    host=ours.get("host_us"),
                    lax=theirs.get("us"),
                    nccl=direct.get(key),
                    nccl_enqueue=direct.get(f"host {key}"),
                    zero_cta=zero.get(key),
                    zero_cta_enqueue=zero.get(f"host {key}"),
                    copy=limits.get(copy_name(operation, size, gpus)),
                    predicted=1e6 * nvswitch.predict(operation, size, gpus).direct,
                )
            )
    return found


def failures(chains: Mapping[str, Any], nccl: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What failed, and its error's text."""
    found = [(name, entry["failed"]) for name, entry in chains.items() if "failed" in entry]
    found += [("NCCL direct", nccl["failed"])] if "failed" in nccl else []
    return [(name, text[-2000:]) for name, text in found]


def _us(value: float | None, enqueue: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" + (" (host)" if enqueue is not None and enqueue > 0.9 * value else "")


def _ratio(other: float | None, ours: float | None) -> str:
    return "-" if other is None or ours is None else f"{other / ours:.2f}x"


_HEADERS = (
    "bytes",
    "hoccl_jax us",
    "GB/s",
    "jax.lax us",
    "over jax.lax",
    "NCCL direct us",
    "over NCCL",
    "NCCL zero-CTA us",
    "over zero-CTA",
    "share of the bare copy",
    "predicted us",
    "host us",
)


def _cells(line: Line) -> list[str]:
    return [
        report.size_text(line.size),
        _us(line.hoccl),
        "-" if line.hoccl is None else f"{line.moved / line.hoccl / 1e3:.0f}",
        _us(line.lax),
        _ratio(line.lax, line.hoccl),
        _us(line.nccl, line.nccl_enqueue),
        _ratio(line.nccl, line.hoccl),
        _us(line.zero_cta, line.zero_cta_enqueue),
        _ratio(line.zero_cta, line.hoccl),
        "-" if line.copy is None or line.hoccl is None else f"{line.copy / line.hoccl:.2f}",
        _us(line.predicted),
        _us(line.host),
    ]


def tables(form: str, of_form: Sequence[Line]) -> str:
    """Markdown: a section with a table for each operation."""
    parts = [f"## {form[0].upper()}{form[1:]}"]
    for operation in dict.fromkeys(line.operation for line in of_form):
        cells = [_cells(line) for line in of_form if line.operation == operation]
        parts += [f"### {operation}", tabulate(cells, _HEADERS, tablefmt="github", disable_numparse=True)]
    return "\n\n".join(parts)


def page(title: str, head: Sequence[str], picture: str, forms: Mapping[str, Sequence[Line]], rest: Sequence[tuple[str, str, str]]) -> str:
    """The whole page, in Markdown. `rest`: what, result, wanted."""
    parts = [f"# {title}", *head, f"![Bandwidth over size; python -m benchmarks.gpu_plots draws it]({picture})", NOTES]
    parts += [tables(form, of_form) for form, of_form in forms.items() if of_form]
    parts += ["## Further", results(rest)]
    return "\n\n".join(parts) + "\n"


def results(rows: Sequence[tuple[str, str, str]]) -> str:
    """Markdown: a table of what, result, wanted."""
    lines = [f"| {what} | {' '.join(result.split()).replace('|', '/')} | {wanted} |" for what, result, wanted in rows]
    return "\n".join(["| what | result | wanted |", "|---|---|---|", *lines])


def text(line: Line) -> str:
    """The line in short."""
    parts = [f"hoccl {_us(line.hoccl)}", f"lax {_us(line.lax)} ({_ratio(line.lax, line.hoccl)})"]
    if line.nccl is not None or line.zero_cta is not None:
        parts += [f"NCCL {_us(line.nccl)} ({_ratio(line.nccl, line.hoccl)})", f"zero-CTA {_us(line.zero_cta)}"]
    if line.copy is not None and line.hoccl is not None:
        parts.append(f"copy {line.copy / line.hoccl:.2f}")
    return f"{line.operation} {report.size_text(line.size)}: {', '.join(parts)}"
