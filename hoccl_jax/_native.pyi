"""The compiled extension (xla_ffi/module.cc). Errors of the engine are RuntimeError."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

sched: ModuleType
"""The collective scheduler (xla_ffi/sched_bindings.cc)."""

def ffi_api_version() -> tuple[int, int]:
    """Major and minor version of the XLA FFI headers that the handlers are built with."""

def registrations() -> dict[str, dict[str, dict[str, object]]]:
    """Platform -> target -> stage -> handler (a capsule), as jax.ffi.register_ffi_target takes them."""

def start(config: Mapping[str, Any], process_index: int, process_count: int, devices: Sequence[tuple[int, int, str]]) -> None:
    """Starts the engine with the fields of `Config` and the local devices: (jax.Device.id, ordinal of XLA's FFI, platform)."""

def address() -> bytes:
    """How other processes reach this one; opaque."""

def connect(process_index: int, address: bytes) -> None:
    """Connects with the process that has this address. Blocks without holding the GIL."""

def stop() -> None:
    """Stops the engine; operations that wait end with an error. Blocks without holding the GIL."""

def stats() -> dict[str, Any]:
    """Counters since the start or the last `reset_stats`."""

def reset_stats() -> None: ...
def enter_foreground() -> None:
    """Begins a region of foreground traffic. Regions are counted."""

def leave_foreground() -> None:
    """Ends a region of foreground traffic."""

def start_trace() -> None:
    """Records from now on."""

def finish_trace(path: str) -> None:
    """Stops recording and writes the file."""

def shared_contexts() -> dict[int, str]: ...
def topology() -> dict[str, Any]:
    """This node, its copying threads, and the processes with their devices and how they are reached."""

def check_streams() -> None:
    """Raises the failure that ended the exchange between this process's CUDA devices and others; nothing while it runs."""

def compilation_began() -> None:
    """Tells the engine that this thread compiles: call sites that it instantiates belong to one executable."""

def compilation_ended(module: str) -> None:
    """Tells the engine that the compilation which this thread waited for is over; `module` is the name of the lowered module."""
