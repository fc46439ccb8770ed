"""Schedules in the simulator: our plans against the bound, the baselines and the paper's figures, and what planning costs.

    python -m benchmarks.schedule                      # docs/results/schedule.md and its plots; several minutes
    python -m benchmarks.schedule --quick --output /tmp/schedule

Only planning times depend on the machine.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Sequence

from absl import app, flags
from tabulate import tabulate
from tqdm import tqdm

from benchmarks import report, schedule_plots
from benchmarks import schedule_cases as cases

_QUICK = flags.DEFINE_bool("quick", False, "Up to 8 nodes only, planning up to 128: a minute.")
_OUTPUT = flags.DEFINE_string("output", "docs/results", "Folder of the page and its plots.")

_BYTES = 1 << 30  # of a rank
_MEASURED_COPIES = {1: 279, 2: 343, 4: 369, 8: 380}  # MiB -> GB/s: cudaMemcpyBatchAsync between two H200s, 256 MiB in all
_PAPER = {"send": 48.8, "all_gather": 48.2, "all_to_all": 57.7}  # GB/s at 1 GB, HOCCL's section 6.2

_ASSUMPTIONS = """\
- Nodes of 8 devices. Links of 200 GB/s in and out of each device, any pairing at full speed; a NIC of 50 GB/s for each device, any pairing
  on a rail (and for the baselines also across rails) at full speed.
- A copy engine makes one copy at a time and needs 0.9 us between two; a NIC 0.2 us between two writes, and 4 us until a byte arrives.
  Seeing that a step is over and starting the next takes 3 us, the first step comes 12 us after the call.
- Copies into one device at the same time queue. A copy engine passes over a copy while two others go to its receiver; copies for other
  nodes go before those within the node. All this holds for the baselines too.
- Connections that are used all at once (the baseline of that name) share NICs fairly and without loss, however many there are: kinder than
  networks are.
- The bound: what the busiest link or the NICs of the busiest node must carry, over their speed. Staging, which takes link time at both
  ends, is not in it."""


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def comparison(results: Sequence[cases.Case]) -> str:
    rows = []
    for case in results:
        limit = 1.05 if case.pattern == "uniform" else 1.10
        gain = case.baselines["rotation"] / case.ours
        rows.append(
            [case.pattern, case.nodes, f"{case.bound * 1e3:.3g}", case.stages, _ratio(case.ratio)]
            + [_ratio(case.baseline_ratio(name)) if name in case.baselines else "" for name in cases.BASELINES]
            + [f"<= {limit:.2f}: {_verdict(case.ratio <= limit)}", _verdict(case.ratio <= case.best_baseline)]
            + [f"{gain:.2f}" if case.pattern == "uniform" else f"{gain:.2f}: {_verdict(gain >= 2)}"]
        )
    headers = [
        "traffic",
        "nodes",
        "bound ms",
        "stages",
        "plan",
        *cases.BASELINES,
        "target",
        "no baseline better",
        "rotation / plan, >= 2 if skewed",
    ]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def by_size(results: Sequence[cases.Case]) -> str:
    rows = [
        [
            case.pattern,
            report.size_text(case.bytes_of_rank),
            f"{case.ours * 1e3:.3g}",
            _ratio(case.ratio),
            _ratio(case.best_baseline),
            _verdict(case.ratio <= case.best_baseline),
        ]
        for case in results
    ]
    headers = ["traffic", "bytes/rank", "ms", "plan", "best baseline", "no baseline better"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def bandwidths(results: Sequence[cases.Bandwidth]) -> str:
    rows = [
        [report.size_text(b.size) if b.size % 1024 == 0 else f"{b.size / 1e9:g} GB"]
        + [f"{rate / 1e9:.1f}" for rate in (b.send, b.send_all_rails, b.all_gather, b.all_to_all)]
        for b in results
    ]
    last = results[-1]
    rates = {name: getattr(last, name) / 1e9 for name in _PAPER}
    rows.append(["paper, 1 GB", f"{_PAPER['send']}", "", f"{_PAPER['all_gather']}", f"{_PAPER['all_to_all']}"])
    rows.append(["target", *(_verdict(rates["send"] >= _PAPER["send"]), ""), *(_verdict(rates[n] >= _PAPER[n]) for n in list(_PAPER)[1:])])
    headers = ["size", "send/recv, one rail", "send/recv, 8 rails", "all-gather, bus", "all-to-all, bus"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def ablations(results: Sequence[cases.Ablation]) -> str:
    rows = [[a.pattern, a.nodes, *map(_ratio, (a.plan, a.rotation, a.greedy, a.blind_copies))] for a in results]
    headers = ["traffic", "nodes", "plan", "whole pairs, rotation", "whole pairs, greedy", "copy engines that do not pass over"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def planning(results: Sequence[cases.PlanningTime], cached: float) -> str:
    limits = {8: 1e-3, 128: 100e-3}
    rows = [
        [
            p.pattern,
            f"{p.nodes} x {cases.DEVICES}",
            p.stages,
            f"{p.seconds * 1e3:.3g}",
            _ratio(p.ratio_by_stages),
            f"<= {limits[p.nodes] * 1e3:g} ms: {_verdict(p.seconds <= limits[p.nodes])}" if p.nodes in limits else "",
        ]
        for p in results
    ]
    rows.append(["any, cached", "8 x 8", "", f"{cached * 1e3:.2g}", "", f"< 0.001 ms: {_verdict(cached < 1e-6)}"])
    return tabulate(rows, ["traffic", "size", "stages", "ms", "stages / bound", "target"], tablefmt="github", disable_numparse=True)


def calibration() -> str:
    rows = [[f"{mib} MiB", measured, f"{cases.copy_bandwidth(mib << 20) / 1e9:.0f}"] for mib, measured in _MEASURED_COPIES.items()]
    return tabulate(rows, ["chunks of", "measured GB/s", "simulated GB/s"], tablefmt="github", disable_numparse=True)


def page(sections: Sequence[tuple[str, str]]) -> str:
    parts = ["# Schedules in the simulator"]
    for title, text in sections:
        parts += [f"## {title}", text] if title else [text]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    folder = pathlib.Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    nodes = [2, 4, 8] if _QUICK.value else [2, 4, 8, 16, 32, 64, 128]
    few, many = ([4], [8, 128]) if _QUICK.value else ([8, 32], [8, 32, 128, 1024])
    steps = tqdm([(p, n) for p in cases.PATTERNS for n in nodes], "traffic x nodes", disable=None)
    compared = [cases.measure(pattern, n, _BYTES) for pattern, n in steps]
    hard = [cases.measure(pattern, n, _BYTES) for pattern in tqdm(cases.HARD_PATTERNS, "hard traffic", disable=None) for n in [2, *few]]
    all_patterns = tqdm(cases.PATTERNS + cases.HARD_PATTERNS, "sizes", disable=None)
    sizes = [cases.measure(pattern, few[0], 1 << exponent) for pattern in all_patterns for exponent in range(20, 33, 2)]
    paper = [cases.paper_bandwidth(size) for size in [2 << 20, 16 << 20, 128 << 20, 10**9]]
    ablated = [cases.ablate(pattern, n, _BYTES) for pattern in ("uniform", "zipf", "zipf per source") for n in few]
    planned = [cases.planning_time(pattern, n, _BYTES) for n in tqdm(many, "planning", disable=None) for pattern in ("uniform", "zipf")]
    schedule_plots.ratios(compared, folder / "schedule-nodes.png")
    plotted = [case for case in sizes if case.pattern in ("uniform", "zipf", "zipf per source")]
    schedule_plots.sizes(plotted, paper, folder / "schedule-sizes.png")
    schedule_plots.stages(folder / "schedule-stages.png")
    text = page(
        [
            (
                "",
                f"{datetime.date.today().isoformat()}, `python -m benchmarks.schedule`; planning times on {report.cpu_model()}, one core.",
            ),
            ("Assumed", _ASSUMPTIONS),
            ("A copy engine, measured and simulated (H200, link of 394 GB/s)", calibration()),
            (f"Completion time over the bound, {_BYTES >> 30} GiB of each rank", comparison(compared)),
            ("", "![Completion time over the bound, by nodes](schedule-nodes.png)"),
            ("Harder traffic (see benchmarks/schedule_cases.py)", comparison(hard)),
            (f"By size, {few[0]} nodes", by_size(sizes)),
            ("The paper's setting: two nodes, GB/s", bandwidths(paper)),
            ("", "![By size](schedule-sizes.png)"),
            ("What parts are worth: completion time over the bound", ablations(ablated)),
            ("Planning, C++", planning(planned, cases.cached_plan_seconds(8))),
            ("", "stages / bound: transfers between nodes alone; below 1 where the bound is a link that also has bytes of its own node."),
            ("What the NICs do: first rail, 6 nodes, skewed traffic, a colour for each stage", "![Writes by stage](schedule-stages.png)"),
        ]
    )
    (folder / "schedule.md").write_text(text)
    print(text)


if __name__ == "__main__":
    app.run(main)
