"""Start, stop and restart of the engine in one process, statistics and topology, and the check of XLA's version."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from hoccl_jax import _native, runtime

RING = [(rank, (rank + 1) % 8) for rank in range(8)]


def ring_program(name: str = "rotate") -> tuple[Any, jax.Array]:
    """A jitted rotation over eight devices with this name, and an operand of 16 float32 a device."""

    def rotate(x: jax.Array) -> jax.Array:
        return hoccl_jax.ppermute(x, "x", RING)

    rotate.__name__ = name
    mesh = Mesh(np.array(jax.devices()), "x")
    x = jax.device_put(np.arange(128, dtype=np.float32), NamedSharding(mesh, P("x")))
    return jax.jit(jax.shard_map(rotate, mesh=mesh, in_specs=P("x"), out_specs=P("x"))), x


def rotated(x: jax.Array) -> np.ndarray:
    return np.roll(np.asarray(x), 16)


def running() -> bool:
    try:
        _native.stats()
    except RuntimeError:
        return False
    return True


def test_init_and_shutdown_may_be_repeated() -> None:
    hoccl_jax.init()
    hoccl_jax.init()
    assert running()
    hoccl_jax.shutdown()
    assert not running()
    hoccl_jax.shutdown()
    assert not running()


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_has_no_engine_and_can_shut_down() -> None:
    hoccl_jax.init()
    child = os.fork()
    if child == 0:
        refused = not running()
        hoccl_jax.shutdown()
        os._exit(0 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert running()


@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.parametrize("started", [True, False])
def test_a_child_forked_after_jax_has_started_is_told_so(started: bool) -> None:
    """By whatever would start the engine, whether it ran in the parent or not, and though a thread of the parent held the lock."""
    jax.devices()
    (hoccl_jax.init if started else hoccl_jax.shutdown)()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with runtime._lock:
                held.set()
                release.wait()

        holder = pool.submit(hold)
        held.wait()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(60)
                for use in (hoccl_jax.init, hoccl_jax.stats, hoccl_jax.foreground().__enter__):
                    with pytest.raises(RuntimeError, match="JAX does not survive a fork"):
                        use()
                hoccl_jax.check_errors()
                hoccl_jax.shutdown()
                code = 0
            finally:
                os._exit(code)
        release.set()
        holder.result()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert running() == started


def test_a_child_forked_before_jax_has_started_runs(tmp_path: pathlib.Path) -> None:
    program = """
import jax, os
jax.config.update('jax_platforms', 'cpu')
import hoccl_jax
child = os.fork()
hoccl_jax.init()
os.write(1, f"started {hoccl_jax.stats()['failures']}\\n".encode())  # one write: both processes have this pipe
if child: assert os.waitpid(child, 0)[1] == 0
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "started 0\n" * 2), result.stderr


def test_first_use_starts_the_engine() -> None:
    hoccl_jax.shutdown()
    program, x = ring_program()
    np.testing.assert_array_equal(program(x), rotated(x))
    assert running()


def test_statistics_and_topology_start_the_engine() -> None:
    for use in (hoccl_jax.stats, hoccl_jax.topology, hoccl_jax.reset_stats):
        hoccl_jax.shutdown()
        use()
        assert running()


def test_compiled_programs_fail_after_shutdown_and_run_after_init() -> None:
    program, x = ring_program()
    np.testing.assert_array_equal(program(x), rotated(x))
    hoccl_jax.shutdown()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"call hoccl_jax.init\(\)"):
        jax.block_until_ready(program(x))
    hoccl_jax.init()
    np.testing.assert_array_equal(program(x), rotated(x))


@pytest.mark.parametrize(
    ("started", "shared", "given", "wanted"),
    [
        (False, False, None, "32"),
        (False, False, "1", "1"),
        (False, True, None, None),
        (False, True, "2", "2"),
        (True, False, None, None),
    ],
)
def test_jax_gets_all_hardware_queues(
    started: bool, shared: bool, given: str | None, wanted: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has said how many, JAX has started and the driver read the variable, or processes share them through MPS."""
    monkeypatch.setattr(runtime.xla_bridge, "backends_are_initialized", lambda: started)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if shared:
        os.mkfifo(tmp_path / "control")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    runtime._take_all_hardware_queues()
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == wanted


def test_transfers_in_a_shared_context_are_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dictionary stands for a GPU without room for a second context, which this machine may not have."""
    hoccl_jax.shutdown()
    monkeypatch.setattr(runtime._native, "shared_contexts", lambda: {3: "cuCtxCreate: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"})
    with caplog.at_level("WARNING", logger="hoccl_jax"):
        hoccl_jax.init()
    (record,) = caplog.records
    assert "device 3" in record.message
    assert "CUDA_ERROR_OUT_OF_MEMORY" in record.message
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8" in record.message


def test_threads_start_it_once() -> None:
    hoccl_jax.shutdown()
    incarnation = runtime._state.incarnation
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(hoccl_jax.init) for _ in range(32)]:
            future.result()
    assert runtime._state.incarnation == incarnation + 1


def test_statistics_count_operations_and_bytes() -> None:
    program, x = ring_program()
    jax.block_until_ready(program(x))
    hoccl_jax.reset_stats()
    before = hoccl_jax.stats()
    assert before["operations"]["ppermute"] == 0
    assert sum(before["bytes"].values()) == 0
    jax.block_until_ready(program(x))
    after = hoccl_jax.stats()
    assert after["operations"]["ppermute"] == 8
    assert sum(after["bytes"].values()) == x.nbytes
    assert after["failures"] == 0
    assert after["open_meetings"] == 0


def test_topology_lists_the_devices() -> None:
    topology = hoccl_jax.topology()
    assert topology["node"]
    assert [process["process"] for process in topology["processes"]] == [0]
    assert topology["processes"][0]["connected"]
    assert topology["processes"][0]["devices"] == [device.id for device in jax.devices()]


def test_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    hoccl_jax.shutdown()
    monkeypatch.setenv("HOCCL_COPY_THREADS", "3")
    monkeypatch.setenv("HOCCL_LOG_LEVEL", "info")
    assert hoccl_jax.topology()["copy_threads"] == 3
    assert logging.getLogger("hoccl_jax").level == logging.INFO
    hoccl_jax.shutdown()
    monkeypatch.undo()
    hoccl_jax.init()
    assert logging.getLogger("hoccl_jax").level == logging.WARNING


def test_a_bad_setting_is_an_error_and_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    hoccl_jax.shutdown()
    monkeypatch.setenv("HOCCL_CHUNK_BYTES", "many")
    with pytest.raises(ValueError, match="HOCCL_CHUNK_BYTES='many'"):
        hoccl_jax.init()
    assert not running()
    monkeypatch.undo()
    hoccl_jax.init()


@pytest.mark.parametrize("name", ["step", "<lambda>", "_private_"])
def test_compilations_are_announced_even_after_listeners_are_cleared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine tells inlined copies of a call apart by counting within an executable, so it must hear of each executable's end."""
    ended = []
    announce = _native.compilation_ended

    def note(module: str) -> None:
        ended.append(module)
        announce(module)

    monkeypatch.setattr(_native, "compilation_ended", note)
    jax.monitoring.clear_event_listeners()
    program, x = ring_program(name)
    jax.block_until_ready(program(x))
    (module,) = re.findall(r' module = "(.*?)"', program.lower(x).as_text())
    assert ended == [module]
    jax.block_until_ready(program(x))
    assert ended == [module]


@pytest.mark.parametrize("runtime_version", [(0, 2), (1, 9)])
def test_handlers_newer_than_xla_are_not_registered(
    runtime_version: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """XLA would refuse them when a backend starts, which then is lost with all of jax."""
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR {}\n#define XLA_FFI_API_MINOR {}\n".format(*runtime_version))
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    registered: list[Any] = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *args, **kwargs: registered.append(args))
    runtime._register_handlers.cache_clear()
    with pytest.raises(ImportError, match=r"built for version 0\.\d of XLA's FFI.*has {}\.{}".format(*runtime_version)):
        runtime.register_targets()
    assert registered == []


def test_the_installed_xla_is_recognised() -> None:
    major, minor = runtime._xla_ffi_version()
    built_major, built_minor = _native.ffi_api_version()
    assert major == built_major
    assert minor >= built_minor


def test_exit_with_an_engine_that_runs_is_clean(tmp_path: pathlib.Path) -> None:
    program = "import jax; jax.config.update('jax_platforms', 'cpu'); import hoccl_jax; hoccl_jax.init(); print('started')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "started\n", "")
