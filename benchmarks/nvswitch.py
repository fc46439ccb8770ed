"""What the simulator predicts for the GPUs of one host behind NVSwitch, to be compared with measurements of benchmarks/gpu_check.py.

python -m benchmarks.nvswitch                      # docs/results/nvswitch.md
python -m benchmarks.nvswitch --output /tmp/page
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import app
from tabulate import tabulate

from benchmarks import report, schedule_cases
from hoccl_jax._native import sched

OPERATIONS = ("ppermute", "all_to_all", "all_gather", "ragged_all_to_all")
_WHOLE = 1 << 40  # bytes of a chunk: no flow is divided
SIZES = (64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30)


# us on two H200s, a process each: docs/results/h200x2-2026-11-30.md.
_MEASURED = {
    ("ppermute", 1 << 20): 18.0,
    ("ppermute", 8 << 20): 38.7,
    ("ppermute", 64 << 20): 200.7,
    ("ppermute", 256 << 20): 769.2,
    ("ppermute", 1 << 30): 2857.7,
    ("all_to_all", 8 << 20): 38.0,
    ("all_to_all", 64 << 20): 115.0,
    ("all_to_all", 256 << 20): 441.2,
    ("all_to_all", 1 << 30): 1458.4,
    ("all_gather", 8 << 20): 48.2,
    ("all_gather", 64 << 20): 208.1,
    ("all_gather", 256 << 20): 806.9,
    ("all_gather", 1 << 30): 2851.3,
}

_ASSUMPTIONS = """\
- A link of 394 GB/s in and out of each GPU, any pairing at full speed: what a copy between two H200s reaches, of 450 nominal.
- A copy engine makes one copy at a time and needs 0.9 us between two. An operation takes 12 us until its first copy starts.
- Direct, which is what the engine does within a node: every rank's copies, whole, from its right-hand neighbour on, each as soon as the one
  before it is over and its receiver is free.
- Rotation: the same in steps that all ranks take together. Scheduled: a plan of the scheduler, in chunks of at most 4 MiB.
- A rank's own slice costs nothing. On two GPUs its copy takes part of what the measured operation is slower.
- Sizes are those of a rank's operand. Of all_to_all each other rank gets its part of it. The ragged traffic is Zipf-skewed: destinations
  are popular in proportion to 1/k, alike for all sources but for a log-normal factor.
- The bound: what the busiest link must carry, over its speed."""


def bytes_between(operation: str, size: int, gpus: int) -> np.ndarray:
    """int64 [gpus, gpus], row = source: what each rank sends to each, of operands of `size` bytes a rank."""
    if operation == "ppermute":
        return np.roll(np.eye(gpus, dtype=np.int64), 1, axis=1) * size
    if operation in ("send", "broadcast"):  # from rank 0: to rank 1, or to all
        matrix = np.zeros((gpus, gpus), np.int64)
        matrix[0, slice(1, 2) if operation == "send" else slice(1, None)] = size
        return matrix
    if operation == "all_to_all":
        return np.full((gpus, gpus), size // gpus, np.int64)
    if operation == "all_gather":
        return np.full((gpus, gpus), size, np.int64)
    if operation == "ragged_all_to_all":
        return schedule_cases.bytes_between("zipf", gpus, size)
    raise ValueError(f"unknown operation {operation!r}")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds."""

    direct: float
    rotation: float
    scheduled: float
    bound: float


def predict(operation: str, size: int, gpus: int) -> Prediction:
    """Of an operation whose operands have `size` bytes a rank."""
    where = schedule_cases.h200_node(gpus)
    matrix = bytes_between(operation, size, gpus)
    np.fill_diagonal(matrix, 0)  # the own part does not take the link
    traffic = sched.Traffic.matrix(matrix)
    return Prediction(
        sched.simulate_baseline("all_at_once", traffic, where, _WHOLE),
        sched.simulate_baseline("rotation", traffic, where, _WHOLE),
        sched.simulate(sched.plan(where, traffic)),
        sched.lower_bound(traffic, where),
    )


def _rows(gpus: int) -> list[list[str]]:
    rows = []
    for operation in OPERATIONS:
        for size in SIZES:
            found = predict(operation, size, gpus)
            times = [f"{1e6 * seconds:.1f}" for seconds in dataclasses.astuple(found)]
            rows.append([operation, report.size_text(size), *times, f"{found.bound / found.direct:.2f}"])
    return rows


def _calibration() -> str:
    rows = []
    for (operation, size), measured in _MEASURED.items():
        predicted = 1e6 * predict(operation, size, 2).direct
        rows.append([operation, report.size_text(size), f"{measured:.1f}", f"{predicted:.1f}", f"{predicted / measured:.2f}"])
    return tabulate(rows, ["operation", "size", "measured us", "predicted us", "ratio"], tablefmt="github", disable_numparse=True)


def page() -> str:
    headers = ["operation", "size", "direct us", "rotation us", "scheduled us", "bound us", "bound / direct"]
    parts = ["# GPUs of one host behind NVSwitch, predicted"]
    parts += [f"{datetime.date.today()}, `python -m benchmarks.nvswitch`. Nothing here was measured on more than two GPUs."]
    parts += ["## Assumed", _ASSUMPTIONS, "## Two GPUs, against measurements", _calibration()]
    for gpus in (4, 8):
        parts += [f"## {gpus} GPUs", tabulate(_rows(gpus), headers, tablefmt="github", disable_numparse=True)]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 2:
        raise app.UsageError(f"one folder at most, got {argv[1:]}")
    folder = pathlib.Path(argv[1] if len(argv) > 1 else "docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    text = page()
    (folder / "nvswitch.md").write_text(text)
    print(text)


if __name__ == "__main__":
    app.run(main)
