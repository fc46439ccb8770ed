"""The main example: a short training run on hoccl_jax and on jax.lax gives one and the same loss curve."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import cast

import pytest

import hoccl_jax
from examples import pipeline_training

_SMALL = ["--layers=8", "--width=32", "--sequence=16", "--microbatches=3", "--microbatch=8", "--log_every=1"]
_PACKAGE_PARENT = str(pathlib.Path(hoccl_jax.__file__).parents[1])  # the script uses the package that this process uses, installed or not


def run(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, pipeline_training.__file__, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def train(*args: str) -> tuple[str, dict[str, list[float]]]:
    """Runs the example; returns its output and each trainer's losses."""
    completed = run(*_SMALL, *args)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    losses: dict[str, list[float]] = {}
    for line in re.findall(r"step +\d+  loss (.*)", completed.stdout):
        for name, loss in re.findall(r"(\w+) ([\d.]+)", line):
            losses.setdefault(name, []).append(float(loss))
    return completed.stdout, losses


@pytest.mark.parametrize(("processes", "steps"), [(1, 12), pytest.param(2, 3, marks=pytest.mark.any_jax)])
def test_both_collectives_give_the_same_curve(processes: int, steps: int) -> None:
    output, losses = train(f"--steps={steps}", f"--processes={processes}")
    assert f"identical bit for bit over {steps} steps" in output
    assert re.search(r"\| hoccl +\| +[\d.]+ +\| +[\d.]+ +\|", output)
    assert len(losses["hoccl"]) == steps
    assert losses["hoccl"] == losses["lax"]
    assert losses["hoccl"][-1] < losses["hoccl"][0] - (0.5 if steps == 12 else 0)


@pytest.mark.any_jax
def test_stages_and_shards_do_not_change_what_is_learnt() -> None:
    """One stage is plain data parallelism, so agreement says that the pipeline computes the model's loss and its gradients."""
    _, flat = train("--steps=4", "--stages=1", "--collectives=hoccl")
    _, deep = train("--steps=4", "--stages=4", "--collectives=hoccl", "--schedule=gpipe")
    assert flat["hoccl"] == pytest.approx(deep["hoccl"], abs=2e-5)


class Diverging:
    """A trainer with a fixed loss curve."""

    def __init__(self, name: str, losses: list[float]):
        self.name = name
        self._losses = iter(losses)

    def step(self, tokens: object) -> float:
        return next(self._losses)


@pytest.mark.parametrize("second", [1.0000000000000002, float("nan")])
def test_a_difference_in_one_bit_ends_the_run(second: float) -> None:
    trainers = cast("list[pipeline_training.Trainer]", [Diverging("hoccl", [2.0, 1.0, 0.5]), Diverging("lax", [2.0, second, 0.5])])
    with pytest.raises(SystemExit, match="step 1: the losses differ"):
        pipeline_training.train(trainers, iter(range(3)), steps=3, log_every=1, quiet=True)


def test_sizes_that_do_not_divide_are_refused() -> None:
    completed = run("--layers=6")
    assert completed.returncode != 0
    assert "--layers is 6, it must be a multiple of 4" in completed.stdout + completed.stderr
