"""A trace shows operations and chunks of what ran while it was recorded, as trace events."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from hoccl_jax import runtime

_ROWS = 1 << 18  # of a rank, float32: 1 MiB, which takes several chunks


def gather_program() -> tuple[Any, jax.Array]:
    mesh = Mesh(np.array(jax.devices()[:4]), "x")
    x = jax.device_put(np.arange(4 * _ROWS, dtype=np.float32), NamedSharding(mesh, P("x")))
    gather = jax.jit(jax.shard_map(lambda x: hoccl_jax.all_gather(x, "x", tiled=True), mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    return gather, x


def read(path: pathlib.Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def test_trace_has_each_operation_and_every_byte_of_its_chunks(tmp_path: pathlib.Path) -> None:
    gather, x = gather_program()
    jax.block_until_ready(gather(x))  # not recorded
    with hoccl_jax.trace(tmp_path / "gather.json"):
        jax.block_until_ready(gather(x))
    trace = read(tmp_path / "gather.json")
    assert trace["otherData"]["dropped_events"] == 0
    events = trace["traceEvents"]
    begins = [event for event in events if event["ph"] == "b"]
    ends = {event["id"]: event for event in events if event["ph"] == "e"}
    assert sorted(event["args"]["device"] for event in begins) == [0, 1, 2, 3]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    moved: dict[str, int] = {}
    for chunk in (event for event in events if event["ph"] == "X"):
        assert chunk["args"]["operation"].startswith(f"all_gather float32[{_ROWS}]")
        source, destination = map(int, chunk["args"]["flow"].split("->"))
        assert (chunk["args"]["from_device"], chunk["args"]["to_device"]) == (source, destination)
        assert tracks[chunk["tid"]].startswith(f"device {destination}, ")
        moved[chunk["args"]["flow"]] = moved.get(chunk["args"]["flow"], 0) + chunk["args"]["bytes"]
        (operation,) = (event for event in begins if event["args"]["device"] == destination)
        assert operation["ts"] <= chunk["ts"]
        assert chunk["ts"] + chunk["dur"] <= ends[operation["id"]]["ts"] + 0.01  # printed in nanoseconds
    assert moved == {f"{source}->{destination}": 4 * _ROWS for source in range(4) for destination in range(4)}


def test_one_trace_at_a_time_and_a_file_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    two = hoccl_jax.trace(tmp_path / "two.json")
    with hoccl_jax.trace(tmp_path / "one.json"), pytest.raises(RuntimeError, match="recorded already"), two:
        pass
    with pytest.raises(FileNotFoundError, match="nowhere"):
        hoccl_jax.trace(tmp_path / "nowhere" / "three.json").__enter__()
    with hoccl_jax.trace(tmp_path / "four.json"):
        pass
    assert read(tmp_path / "four.json")["traceEvents"]
    assert not (tmp_path / "two.json").exists()


def test_a_folder_as_the_file_is_refused_at_the_start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        hoccl_jax.trace(tmp_path).__enter__()
    with hoccl_jax.trace(tmp_path / "next.json"):  # nothing is being recorded
        pass
    hoccl_jax.shutdown()
    monkeypatch.setenv("HOCCL_TRACE", str(tmp_path))
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        hoccl_jax.init()
    assert runtime._state.config is None
    # Of several processes each adds its number to the name, which makes no file of a folder.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        runtime._trace_file(tmp_path)
    assert runtime._trace_file(tmp_path / "step.json") == str(tmp_path / "step.0.json")
    (tmp_path / "step.0.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"step\.0\.json"):
        runtime._trace_file(tmp_path / "step.json")


@pytest.mark.parametrize("again", [True, False])
def test_shutdown_within_a_trace_writes_it(again: bool, tmp_path: pathlib.Path) -> None:
    gather, x = gather_program()
    with hoccl_jax.trace(tmp_path / "before.json"):
        jax.block_until_ready(gather(x))
        hoccl_jax.shutdown()
        begun = [event for event in read(tmp_path / "before.json")["traceEvents"] if event["ph"] == "b"]
        if again:
            hoccl_jax.init()
            jax.block_until_ready(gather(x))
    assert len(begun) == 4
    assert [event for event in read(tmp_path / "before.json")["traceEvents"] if event["ph"] == "b"] == begun


def test_the_end_of_a_trace_leaves_that_of_the_next_engine_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, x = gather_program()
    hoccl_jax.init()
    with hoccl_jax.trace(tmp_path / "first.json"):
        hoccl_jax.shutdown()
        monkeypatch.setenv("HOCCL_TRACE", str(tmp_path / "all.json"))
        hoccl_jax.init()
    jax.block_until_ready(gather(x))
    hoccl_jax.shutdown()
    assert len([event for event in read(tmp_path / "all.json")["traceEvents"] if event["ph"] == "b"]) == 4


def test_variable_traces_the_whole_process(tmp_path: pathlib.Path) -> None:
    program = "\n".join(
        [
            "import jax",
            "jax.config.update('jax_num_cpu_devices', 2)",
            "import hoccl_jax",
            "from jax.sharding import PartitionSpec as P",
            "mesh = jax.sharding.Mesh(jax.devices(), 'x')",
            "f = jax.jit(jax.shard_map(lambda x: hoccl_jax.ppermute(x, 'x', [(0, 1)]), mesh=mesh, in_specs=P('x'), out_specs=P('x')))",
            "jax.block_until_ready(f(jax.numpy.ones(4)))",
        ]
    )
    path = os.pathsep.join([str(pathlib.Path(hoccl_jax.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "HOCCL_TRACE": str(tmp_path / "all.json"), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=100)
    (chunk,) = (event for event in read(tmp_path / "all.json")["traceEvents"] if event["ph"] == "X")
    assert chunk["args"]["flow"] == "0->1"
