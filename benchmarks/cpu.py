"""hoccl_jax against jax.lax on CPU devices: medians of calls that alternate within one run, beside a plain memcpy of the same bytes.

    python -m benchmarks.cpu                                        # the table
    python -m benchmarks.cpu --quick                                # the same with few samples
    python -m benchmarks.cpu --output docs/results/cpu-$(date -I).md --plot docs/results/cpu-$(date -I).svg

Run it from the top of the repository on an otherwise idle machine. Across processes jax.lax uses gloo. glibc's default malloc gives every
large result fresh pages, whose faults then dominate; so each layout runs with that and with a malloc that keeps its memory ("tuned").
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence

from absl import app, flags
from tqdm import tqdm

from benchmarks import report
from benchmarks.report import Samples
from hoccl_jax.tools import launch

_QUICK = flags.DEFINE_bool("quick", False, "Few samples: a minute instead of several.")
_OUTPUT = flags.DEFINE_string("output", None, "Also write the table, as Markdown with the facts of the run, to this file.")
_PLOT = flags.DEFINE_string("plot", None, "Also measure sizes from 64 B to 64 MiB and plot them into this file (.svg, .png).")
_LAYOUTS = flags.DEFINE_multi_enum("layout", ["1x4", "2x1", "2x2"], ["1x4", "2x1", "2x2"], "Processes x devices in each; repeatable.")
_MALLOC = flags.DEFINE_multi_enum("malloc", ["default", "tuned"], ["default", "tuned"], "Allocator settings; repeatable.")

_SIZES = (16, 64 << 20)
_SWEEP = tuple(64 * 4**i for i in range(11))  # 64 B to 64 MiB
_MALLOC_SETTINGS = {
    "default": {},
    "tuned": {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_ARENA_MAX": "1"},
}


def run_layout(layout: str, malloc: str, sizes: Iterable[int], repeats: int) -> list[Samples]:
    processes, devices = map(int, layout.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "samples.json"
        program = ["-m", "benchmarks.collectives", f"--sizes={','.join(map(str, sizes))}", f"--repeats={repeats}", f"--output={output}"]
        launch.run(program, processes=processes, devices=devices, env=_MALLOC_SETTINGS[malloc], timeout=1800)
        return [Samples(**case) for case in json.loads(output.read_text())]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    for variable in _MALLOC_SETTINGS["tuned"]:
        os.environ.pop(variable, None)  # "default" must mean glibc's default in the children
    repeats = 5 if _QUICK.value else 25
    facts = report.facts(shlex.join(["python", "-m", "benchmarks.cpu", *sys.argv[1:]]), datetime.date.today(), repeats)
    runs = [(layout, malloc) for layout in dict.fromkeys(_LAYOUTS.value) for malloc in dict.fromkeys(_MALLOC.value)]
    rows = []
    for layout, malloc in tqdm(runs, unit="run", disable=None):
        rows += [report.Row(layout, malloc, samples) for samples in run_layout(layout, malloc, _SIZES, repeats)]
    table = report.table(rows)
    print(f"{facts}\n\n{table}")
    if _PLOT.value:
        sweep = {layout: run_layout(layout, "tuned", _SWEEP, max(3, repeats // 2)) for layout in dict.fromkeys(_LAYOUTS.value)}
        report.plot(sweep, pathlib.Path(_PLOT.value))
    if _OUTPUT.value:
        picture = pathlib.Path(_PLOT.value).name if _PLOT.value else None
        pathlib.Path(_OUTPUT.value).write_text(report.page(facts, table, picture))


if __name__ == "__main__":
    app.run(main)
