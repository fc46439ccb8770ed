"""Processes of a job meet through jax.distributed: all, or those needed; again after a restart; or an error names who is missing."""

from __future__ import annotations

import os
import pathlib
import sys
import textwrap

import pytest

from hoccl_jax.tools import launch

_PRELUDE = """
import jax, numpy as np, hoccl_jax
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

me = jax.process_index()

def everyone_is_here(name):
    distributed.global_state.client.wait_at_barrier(name, 60_000)

def connected():
    return [process["process"] for process in hoccl_jax.topology()["processes"] if process["connected"]]

def gather(processes):
    devices = [device for device in jax.devices() if device.process_index in processes]
    mesh = Mesh(np.array(devices), "x")
    x = jax.make_array_from_callback((len(devices),), NamedSharding(mesh, P("x")), lambda index: np.arange(len(devices))[index])
    body = lambda x: hoccl_jax.all_gather(x, "x", tiled=True)
    result = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x)
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(len(devices)))
"""


def run(tmp_path: pathlib.Path, program: str, processes: int, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60) -> list[str]:
    """Runs the program as a job of one device a process; returns each rank's output."""
    path = tmp_path / "program.py"
    path.write_text(_PRELUDE + textwrap.dedent(program))
    for variable, value in {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "HOCCL_TIMEOUT_S": str(timeout_s)}.items():
        monkeypatch.setenv(variable, value)
    return [result.output for result in launch.run([str(path)], processes=processes, devices=1, timeout=120)]


def test_a_program_connects_the_processes_that_it_spans(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        if me < 2:
            gather([0, 1])
        assert connected() == ([0, 1] if me < 2 else [2]), connected()
        everyone_is_here("looked")
        hoccl_jax.init()
        assert connected() == [0, 1, 2], connected()
        gather([0, 1, 2])
        everyone_is_here("end")
    """
    run(tmp_path, program, 3, monkeypatch)


def test_a_job_restarts_the_engine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        for round in range(3):
            gather([0, 1])
            everyone_is_here(f"used {round}")
            hoccl_jax.shutdown()
            hoccl_jax.init()
            gather([1, 0])
            everyone_is_here(f"end of {round}")
    """
    run(tmp_path, program, 2, monkeypatch)


def test_an_error_names_the_processes_that_do_not_come(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        if me == 0:
            try:
                hoccl_jax.init()
            except TimeoutError as error:
                print(error)
        everyone_is_here("gave up")
        # They can still come later.
        hoccl_jax.init()
        everyone_is_here("end")
    """
    outputs = run(tmp_path, program, 3, monkeypatch, timeout_s=1)
    assert "of 3 processes, 1, 2 did not start the engine within 1 s (HOCCL_TIMEOUT_S)" in outputs[0]
