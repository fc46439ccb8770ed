"""Starts the programs of this folder as jobs of several processes, and reads what their ranks report."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import hoccl_jax
from hoccl_jax.tools import launch

_ROOT = pathlib.Path(__file__).parents[2]

_PACKAGE_PARENT = str(pathlib.Path(hoccl_jax.__file__).parents[1])  # ranks use the package that this process uses, installed or not

DEADLINE_S = 200.0  # for a whole job on a loaded machine


def lost(process: int) -> str:
    """What an error says of a process that has died: who reads from it just then hears it from the kernel, others by its connection."""
    return rf"process {process}\b.*(has died|No such process)"


def environment() -> dict[str, str]:
    """With which ranks find this package and the tests."""
    return {"PYTHONPATH": os.pathsep.join([_PACKAGE_PARENT, str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def start(
    program: str, *args: str, processes: int, devices: int, env: dict[str, str] | None = None, heartbeat_timeout_s: int = 100
) -> launch.Ranks:
    """Starts tests/multiprocess/programs/<program>.py."""
    module = f"tests.multiprocess.programs.{program}"
    return launch.Ranks(
        ["-m", module, *args],
        processes=processes,
        devices=devices,
        env={**environment(), **(env or {})},
        heartbeat_timeout_s=heartbeat_timeout_s,
    )


def reports(result: launch.Result) -> list[dict[str, Any]]:
    """What a rank reported, in order (see `programs.common.report`)."""
    lines = [line[len("REPORT ") :] for line in result.output.splitlines() if line.startswith("REPORT ")]
    return [json.loads(line) for line in lines]


def run(
    program: str, *args: str, processes: int, devices: int, env: dict[str, str] | None = None, deadline_s: float = DEADLINE_S
) -> list[list[dict[str, Any]]]:
    """Runs a job whose ranks must all succeed; returns each rank's reports."""
    with start(program, *args, processes=processes, devices=devices, env=env) as ranks:
        results = ranks.wait(deadline_s)
    if any(result.returncode for result in results):
        raise launch.LaunchError(f"{program} {' '.join(args)} failed", results)
    return [reports(result) for result in results]
