"""The engine of this process, seen from Python: start and stop, meeting the other processes of the job, statistics.

Nothing here is needed to run collectives: the first use starts the engine, and a program's compilation connects the processes that it
spans. `init` does both ahead of time.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import re
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax._src import core, distributed, monitoring, xla_bridge
from jax._src.dispatch import BACKEND_COMPILE_EVENT
from jax._src.interpreters import mlir

from hoccl_jax import _native
from hoccl_jax.config import Config, misspelt

_logger = logging.getLogger("hoccl_jax")


@dataclasses.dataclass
class _State:
    """What runs. Guarded by `_lock`, which is held while a thread waits for other processes: nobody can go on without them anyway."""

    config: Config | None = None  # None: the engine is stopped
    incarnation: int = 0  # starts of the engine in this process; every process of a job counts alike
    connected: set[int] = dataclasses.field(default_factory=set)  # process indices, this one included
    trace_file: str | None = None  # where the trace goes that is being recorded


_HARDWARE_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def _take_all_hardware_queues() -> None:
    """The driver reads the variable when JAX starts. With the default, 8, streams share queues, and a wait holds up what is behind it.

    Under MPS all processes of a GPU share one supply of queues, which does not suffice for contexts of 32 each.
    """
    if not xla_bridge.backends_are_initialized() and not _runs_under_mps():
        os.environ.setdefault(_HARDWARE_QUEUES, "32")


def _runs_under_mps() -> bool:
    """Is CUDA's Multi-Process Service there, whose control daemon listens on this pipe?"""
    return os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control"))


_take_all_hardware_queues()
_lock = threading.RLock()
_state = _State()
_fallbacks: collections.Counter[str] = collections.Counter()  # guarded by _lock
_forked_from_jax = False  # this process is the fork of one in which JAX had started


def _forget_parent() -> None:
    """In a forked child: its parent's engine has no threads here, and a thread that is not here either may have held the lock."""
    global _lock, _forked_from_jax
    _lock = threading.RLock()
    _state.config = None
    _state.connected = set()
    _state.trace_file = None
    _forked_from_jax = _forked_from_jax or xla_bridge.backends_are_initialized()


os.register_at_fork(after_in_child=_forget_parent)


def init() -> None:
    """Starts the engine and connects it with all processes of the job. Does nothing where that is done already.

    Under `jax.distributed` every process must call it, or compile a program with collectives that span the same processes.

    Raises:
      TimeoutError: processes that did not come within HOCCL_TIMEOUT_S; the message names them.
      RuntimeError: the engine can't start, or can't reach a process; or this process was forked from one in which JAX had started.
      ImportError: the extension was built for a newer XLA than the installed jaxlib.
    """
    ensure_connected(range(jax.process_count()))


def shutdown() -> None:
    """Stops the engine; operations that still wait get an error. Does nothing where it is stopped. Runs at exit by itself.

    Under `jax.distributed` all processes must call it, or none. `init`, or the next compilation of a program with collectives, starts the
    engine anew; programs compiled earlier then run again.
    """
    with _lock:
        if _state.config is None:
            return
        try:
            _finish_trace()
        except RuntimeError as error:  # the engine must stop all the same
            _logger.error("no trace: %s", error)
        _native.stop()
        _state.config = None
        _state.connected = set()
        _logger.info("stopped")


def stats() -> dict[str, Any]:
    """Counters since the engine's start or `reset_stats`: operations by kind, bytes and transfers by what moved them, failures.

    "pushes" counts transfers between CUDA devices: by the sender's stream itself ("in_stream") or by the "proxy". "handlers" is about CUDA
    devices too: calls of XLA's into the engine, their time, and the part of it in which they looked out for other ranks
    (HOCCL_PATIENCE_US). "fallbacks" counts what was left to XLA, by function: call sites, when they are compiled, since XLA does not tell
    of their execution.
    """
    with _lock:
        _ensure_started()
        return {**_native.stats(), "fallbacks": dict(_fallbacks)}


def count_fallback(function: str, reason: str) -> None:
    """A call site of `function` is left to XLA."""
    with _lock:
        _fallbacks[function] += 1
    _logger.info("%s is left to XLA: %s", function, reason)


def reset_stats() -> None:
    """Sets the counters of `stats` to zero."""
    with _lock:
        _ensure_started()
        _native.reset_stats()
        _fallbacks.clear()


@contextlib.contextmanager
def foreground() -> Iterator[None]:
    """Marks a region in which this process has urgent traffic of its own, for instance XLA's collectives or a data loader's.

        with hoccl_jax.foreground():
            jax.block_until_ready(latency_critical_program(x))

    While a region is active, transfers of priority "background" that this process copies stop between chunks, as they do while foreground
    transfers of hoccl_jax are active. They don't starve: every HOCCL_BACKGROUND_PATIENCE_MS one chunk moves in spite of it. Of background
    transfers, `stats()["background"]` counts the "chunks" that moved, how many of these were "forced" in spite of foreground traffic, and
    how often such traffic "held" what was left. Regions may nest and overlap, also between threads.

    The region is one of the host's time. RuntimeError inside functions that JAX traces, where there is none.
    """
    if not core.trace_state_clean():
        raise RuntimeError(
            "hoccl_jax.foreground() inside a function that JAX traces, where it would last as long as tracing: use it outside"
        )
    with _lock:
        _ensure_started()
        incarnation = _state.incarnation
        _native.enter_foreground()
    try:
        yield
    finally:
        with _lock:
            if _state.config is not None and _state.incarnation == incarnation:  # a new engine knows nothing of the region
                _native.leave_foreground()


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records what the engine does while the context is active, and writes it to the file `path` at its end.

        with hoccl_jax.trace("step.json"):
            jax.block_until_ready(step(x))

    The file is of the trace-event format: https://ui.perfetto.dev and chrome://tracing show it. Each device has a track with its operations
    (from the call to its end) and one for each thread that copies for it, with the chunks: operation, flow (ranks), bytes, the devices that
    it reads and writes, and of operations that run by a plan of the scheduler the stage, the rail and what the step is. Chunks that cross
    the network are on tracks of both hosts, with the process at the other end (`peer`) and the same number (`chunk`): as `send`, from the
    post to the completion, and where they arrive, from the request on. Times are microseconds of the wall clock. In a job of several
    processes each one writes a file of its own, "step.3.json" that of process 3.

    Of CUDA devices it shows what the streams' flags say, at which a thread looks all the time meanwhile: operations from the moment when
    the stream got there, and each push (`push`, or `forward` of what came from another host) from the moment when both ends were ready
    until all had arrived, on a track of the program's stream or of the engine's copy stream. What goes by the network is shown as above,
    with the chunks' ways into staging buffers and out of them. Copies within a device are not shown.

    `shutdown` within the context ends the recording and writes the file; an engine that starts after it is not recorded.

    Raises, at the start, FileNotFoundError if there is no such folder, IsADirectoryError if `path` is one, RuntimeError if a trace is being
    recorded already; RuntimeError at the end if the file can't be written.
    """
    file = _trace_file(path)
    with _lock:
        _ensure_started()
        incarnation = _state.incarnation
        _native.start_trace()
        _state.trace_file = file
    try:
        yield
    finally:
        with _lock:
            if _state.config is not None and _state.incarnation == incarnation:  # else shutdown has ended it
                _finish_trace()


def _finish_trace() -> None:
    """Writes the trace that is being recorded, if there is one."""
    file, _state.trace_file = _state.trace_file, None
    if file is not None:
        _native.finish_trace(file)


def _trace_file(path: str | os.PathLike[str]) -> str:
    """The file of this process. An error where it can't be one is due before anything is recorded."""
    file = given = pathlib.Path(path)
    if not given.is_dir() and jax.process_count() > 1:
        file = given.with_suffix(f".{jax.process_index()}{given.suffix}")
    if file.is_dir():
        raise IsADirectoryError(f"hoccl_jax: the trace {file} would be a file, but is a folder")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"hoccl_jax: no folder for the trace {file}")
    return str(file)


def topology() -> dict[str, Any]:
    """This process's node, how other hosts are reached, and the job's processes: their node and devices (`jax.Device.id`), are they
    connected, and does their data come by reading their memory directly or by the network."""
    with _lock:
        _ensure_started()
        return dict(_native.topology())


def check_errors() -> None:
    """Raises RuntimeError with the failure of an earlier operation on this process's GPUs, if there was one.

    A GPU's stream can't raise: when a peer dies or does not come within HOCCL_TIMEOUT_S, the streams are let go, the results of the
    operations that were on their way are worthless, and every later operation raises. A sender that is let go may still write where its
    receiver's program had not got to: arrays which that program was yet to read are not to be trusted either. Ask here before results are
    used for good (a checkpoint) with no operation behind them. `shutdown` and `init` start afresh. On CPU devices each operation raises
    its own error.
    """
    with _lock:
        if _state.config is not None:
            _native.check_streams()


def ensure_connected(processes: Iterable[int]) -> None:
    """Starts the engine if needed and connects it with these processes (`jax.process_index`). Errors: those of `init`."""
    with _lock:
        config = _ensure_started()
        missing = sorted(set(processes) - _state.connected)
        if not missing:
            return
        for process, address in _addresses(missing, config.timeout_s).items():
            _native.connect(process, address)
            _state.connected.add(process)
            _logger.info("connected with process %d", process)


def register_targets() -> None:
    """Makes the custom calls known to XLA, once. Must precede the compilation of a program that holds one.

    Raises ImportError instead where XLA would refuse the handlers: a refused handler makes the whole backend unusable.
    """
    with _lock:
        _register_handlers()
        # Whoever clears jax's listeners takes ours with them, and call sites would be counted across executables.
        if _compilation_began not in monitoring.get_scalar_listeners():
            jax.monitoring.register_scalar_listener(_compilation_began)
        if _compilation_ended not in monitoring.get_event_duration_listeners():
            jax.monitoring.register_event_duration_secs_listener(_compilation_ended)


def devices(platform: str) -> list[jax.Device]:
    """The devices of all processes; none where jax has no such platform here."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def has_device(device: jax.Device) -> bool:
    """Is `device` a device of this job's backends, rather than one of a described topology that programs are only compiled for?"""
    client = getattr(device, "client", None)
    return client is not None and any(client is local.client for local in _local_devices())


def _ensure_started() -> Config:
    if _state.config is not None:
        return _state.config
    if _forked_from_jax:
        raise RuntimeError(
            "hoccl_jax can't start in this process, which was forked from one in which JAX had started: JAX does not survive a fork. Fork "
            'before anything uses JAX, or start processes afresh (multiprocessing.get_context("spawn"))'
        )
    register_targets()
    config = Config.from_env()
    _logger.setLevel(config.log_level.upper())
    trace_file = _trace_file(config.trace) if config.trace else None
    for line in misspelt():
        _logger.warning("%s", line)
    if _HARDWARE_QUEUES not in os.environ and not _runs_under_mps() and any(device.platform == "gpu" for device in _local_devices()):
        _logger.warning(
            "JAX had started before hoccl_jax was imported: import it earlier, or set %s=32, or transfers may hold each other up",
            _HARDWARE_QUEUES,
        )
    devices = [(device.id, _ffi_ordinal(device), device.platform) for device in _local_devices()]
    settings = {**dataclasses.asdict(config), "coordinator": _coordinator_host()}
    _native.start(settings, jax.process_index(), jax.process_count(), devices)
    _state.incarnation += 1
    for device, reason in _native.shared_contexts().items():
        _logger.warning(
            "device %d: transfers share JAX's CUDA context, where other calls can hold them up until the deadline, because no other could "
            "be made (%s). It takes 0.7 GB of the device's memory and, under MPS, some of the server's hardware queues: set %s=8 or less",
            device,
            reason,
            _HARDWARE_QUEUES,
        )
    if jax.process_count() > 1:
        try:
            _key_value_store().key_value_set_bytes(_address_key(jax.process_index()), _native.address())
        except BaseException:
            _native.stop()
            raise
    if trace_file is not None:
        _native.start_trace()
    _state.trace_file = trace_file
    _state.config = config
    _state.connected = {jax.process_index()}
    _logger.info("started with devices %s", [device[0] for device in devices])
    return config


def _local_devices() -> list[jax.Device]:
    devices = []
    for platform in _native.registrations():
        try:
            devices += jax.local_devices(backend=platform.lower())
        except RuntimeError:  # jax has no such backend here
            continue
    return devices


def _ffi_ordinal(device: jax.Device) -> int:
    """The number by which XLA's FFI names a device to its handlers: the global id on CPU, the local ordinal on GPU."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def _key_value_store() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "hoccl_jax: several processes meet through jax.distributed, which is not initialized: call jax.distributed.initialize()"
        )
    return client


def _coordinator_host() -> str:
    """Where the coordinator of `jax.distributed` runs; empty without one."""
    address = distributed.global_state.coordinator_address or ""
    return address.rpartition(":")[0].strip("[]")


def _address_key(process: int) -> str:
    return f"hoccl_jax/{_state.incarnation}/{process}"


def _addresses(processes: list[int], timeout_s: float) -> dict[int, bytes]:
    """What these processes published when they started. Waits for all of them, `timeout_s` in all."""
    deadline = time.monotonic() + timeout_s
    store = _key_value_store()
    addresses = {}
    late = []
    for process in processes:
        address = _read_by(deadline, store, _address_key(process))
        if address is None:
            late.append(process)
        else:
            addresses[process] = address
    if late:
        names = ", ".join(map(str, late))
        raise TimeoutError(
            f"hoccl_jax: of {jax.process_count()} processes, {names} did not start the engine within {timeout_s:g} s (HOCCL_TIMEOUT_S). "
            "Every process of a program's mesh must compile it, or call hoccl_jax.init()."
        )
    return addresses


def _read_by(deadline: float, store: Any, key: str) -> bytes | None:
    """The value of `key`, waiting for it; None if it isn't there at `deadline`. Past the deadline it still looks once."""
    while True:
        left_s = deadline - time.monotonic()
        try:
            # In slices, between which an interrupt gets through.
            return bytes(store.blocking_key_value_get_bytes(key, max(1, min(1000, int(left_s * 1000)))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() >= deadline:
                return None


@functools.cache
def _register_handlers() -> None:
    built = _native.ffi_api_version()
    runtime = _xla_ffi_version()
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise ImportError(
            f"hoccl_jax was built for version {built[0]}.{built[1]} of XLA's FFI, but jaxlib {jax.lib.__version__} has "
            f"{runtime[0]}.{runtime[1]}: upgrade jaxlib, or build hoccl_jax with the FFI headers of this one"
        )
    for platform, targets in _native.registrations().items():
        for target, stages in targets.items():
            jax.ffi.register_ffi_target(target, stages, platform=platform)
    atexit.register(shutdown)


def _xla_ffi_version() -> tuple[int, int]:
    """Version of XLA's FFI in the installed jaxlib, from the header that it ships for builders of handlers."""
    header = (pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    versions = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(versions["MAJOR"]), int(versions["MINOR"])


def _compilation_began(event: str, value: float | int, **kwargs: str | int) -> None:
    """Called by jax on the thread that is about to compile."""
    if event == BACKEND_COMPILE_EVENT:
        _native.compilation_began()


def _compilation_ended(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Called by jax on the same thread, also if the compilation failed."""
    if event == BACKEND_COMPILE_EVENT:
        # The name as the module has it: "jit(step)" is lowered as jit_step.
        _native.compilation_ended(mlir.sanitize_name(str(kwargs["fun_name"])).rstrip("_"))
