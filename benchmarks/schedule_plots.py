"""Plots of benchmarks/schedule.py."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import matplotlib
import numpy as np

from benchmarks import schedule_cases as cases
from hoccl_jax._native import sched

matplotlib.use("Agg")
from matplotlib import pyplot


def ratios(results: Sequence[cases.Case], path: pathlib.Path) -> None:
    """Completion time over the bound against the number of nodes, a panel for each kind of traffic."""
    patterns = list(dict.fromkeys(case.pattern for case in results))
    figure, panels = pyplot.subplots(1, len(patterns), figsize=(4 * len(patterns), 3.2), layout="constrained")
    for pattern, panel in zip(patterns, panels, strict=True):
        of_pattern = [case for case in results if case.pattern == pattern]
        nodes = [case.nodes for case in of_pattern]
        panel.plot(nodes, [case.ratio for case in of_pattern], "o-", color="black", label="plan")
        for name in cases.BASELINES:
            panel.plot(nodes, [case.baseline_ratio(name) for case in of_pattern], ".--", label=name)
        panel.axhline(1, color="grey", linewidth=0.5)
        panel.set(xscale="log", yscale="log", title=pattern, xlabel="nodes of 8 devices", ylabel="time / bound")
        panel.set_xticks(nodes, [str(n) for n in nodes])
        panel.set_yticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
        panel.minorticks_off()
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def sizes(results: Sequence[cases.Case], paper: Sequence[cases.Bandwidth], path: pathlib.Path) -> None:
    """On the left time over the bound, on the right the paper's bandwidths, both against size."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for pattern in dict.fromkeys(case.pattern for case in results):
        of_pattern = [case for case in results if case.pattern == pattern]
        mib = [case.bytes_of_rank / 2**20 for case in of_pattern]
        line = left.plot(mib, [case.ratio for case in of_pattern], "o-", label=f"{pattern}: plan")
        left.plot(mib, [case.best_baseline for case in of_pattern], ".--", color=line[0].get_color(), label=f"{pattern}: best baseline")
    left.set(xscale="log", yscale="log", xlabel="MiB of each rank", ylabel="time / bound", title=f"{results[0].nodes} nodes of 8")
    left.legend(fontsize="small")
    names = {"send": "send/recv, one rail", "send_all_rails": "send/recv, 8 rails", "all_gather": "all-gather", "all_to_all": "all-to-all"}
    for name, label in names.items():
        right.plot([b.size / 2**20 for b in paper], [getattr(b, name) / 1e9 for b in paper], "o-", label=label)
    right.set(xscale="log", xlabel="MiB of the operation", ylabel="GB/s (bus)", title="2 nodes of 8")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def stages(path: pathlib.Path) -> None:
    """When each node's first NIC sends and receives, coloured by stage, with the receiver's number."""
    where = cases.topology(6)
    traffic = sched.Traffic.matrix(cases.bytes_between("zipf", where.ranks, 64 << 20))
    plan = sched.plan(where, traffic)
    figure, (sending, receiving) = pyplot.subplots(2, 1, figsize=(9, 4.4), sharex=True, layout="constrained")
    colours = pyplot.get_cmap("tab20")
    for step, (start, end) in zip(plan.steps(), sched.timeline(plan), strict=True):
        if step.leg != "write" or step.rail != 0:
            continue
        begin = max(start, end - step.bytes / where.speeds.nic) * 1e6
        for panel, rank in ((sending, step.from_rank), (receiving, step.to_rank)):
            panel.barh(where.node_of(rank), end * 1e6 - begin, left=begin, color=colours(step.stage % 20), edgecolor="white", linewidth=0.2)
    for panel, title in ((sending, "sending"), (receiving, "receiving")):
        panel.set(title=title, ylabel="node", yticks=np.arange(where.nodes))
        panel.invert_yaxis()
    receiving.set(xlabel="us")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
