"""Draws what `python -m benchmarks.gpu_check --gpus N` measured: bandwidth over size, a panel for each operation and form.

    python -m benchmarks.gpu_plots docs/results/h200x2-2026-11-30.json      # h200x2-bandwidth.png beside it, and in $OUT where that is set

It needs matplotlib, which the machine with the GPUs need not have.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from absl import app

matplotlib.use("Agg")
from matplotlib import pyplot

# Field of gpu_page.Line -> label and style.
_CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "hoccl": ("hoccl_jax", {"color": "black", "marker": "o", "markersize": 4}),
    "lax": ("jax.lax", {"color": "tab:blue", "marker": "."}),
    "nccl": ("NCCL direct", {"color": "tab:green", "marker": ".", "linestyle": "--"}),
    "zero_cta": ("NCCL zero-CTA", {"color": "tab:orange", "marker": ".", "linestyle": "--"}),
    "copy": ("bare copy", {"color": "grey", "linestyle": ":"}),
}


def curve(lines: Sequence[Mapping[str, Any]], field: str) -> tuple[list[int], list[float]]:
    """Bytes of a rank, and GB/s that leave the busiest GPU."""
    points = sorted((line["size"], line["moved"] / line[field] / 1e3) for line in lines if line[field])
    return [size for size, _ in points], [speed for _, speed in points]


def draw(forms: Mapping[str, Sequence[Mapping[str, Any]]], path: pathlib.Path) -> None:
    """`forms`: for each the lines of gpu_page as dictionaries."""
    forms = {form: lines for form, lines in forms.items() if lines}
    operations = list(dict.fromkeys(line["operation"] for lines in forms.values() for line in lines))
    if not operations:
        raise ValueError("nothing was measured: there is nothing to draw")
    figure, panels = pyplot.subplots(
        len(forms), len(operations), figsize=(3.4 * len(operations), 3.2 * len(forms)), sharex=True, squeeze=False, layout="constrained"
    )
    for (form, lines), row in zip(forms.items(), panels, strict=True):
        for operation, panel in zip(operations, row, strict=True):
            of_panel = [line for line in lines if line["operation"] == operation]
            if not of_panel:
                panel.set_axis_off()
                continue
            for field, (label, style) in _CURVES.items():
                sizes, speeds = curve(of_panel, field)
                if sizes:
                    panel.plot(sizes, speeds, label=label, **style)
            panel.set(xscale="log", xlabel="bytes of a rank", ylabel="GB/s out of a GPU")
            panel.set_title(f"{operation}, {form}", fontsize="medium")
            panel.tick_params(labelbottom=True)  # though another panel is below, which may be empty
    panels[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError(f"one file of gpu_check's numbers is needed, got {argv[1:]}")
    file = pathlib.Path(argv[1])
    numbers = json.loads(file.read_text())
    picture = file.with_name(numbers["picture"])
    draw(numbers["forms"], picture)
    if out := os.environ.get("OUT"):
        (pathlib.Path(out) / picture.name).write_bytes(picture.read_bytes())
    print(picture)


if __name__ == "__main__":
    app.run(main)
