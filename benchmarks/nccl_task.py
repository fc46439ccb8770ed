"""The task of benchmarks/gpu_worker.py that calls NCCL directly. It must return whatever NCCL does."""

from __future__ import annotations

import atexit
import contextlib
import copy
import json
import os
import sys
import threading
import traceback
from typing import Any

import jax

from benchmarks import nccl_direct
from benchmarks.gpu_programs import PLATFORM, everyone


def _leave() -> None:
    """Ends the process without the destructors of libraries, some of which wait for operations that may never end."""
    with contextlib.suppress(Exception):
        jax.distributed.shutdown()  # meets the other processes, which would take this one's end for a crash
    os._exit(0)


def nccl(sizes: list[int], seconds: float = 75) -> dict[str, Any]:
    """See `nccl_direct.measure`. What is not measured within so many seconds is missing, and "failed" says so."""
    if PLATFORM == "cpu":
        every = [(operation, size) for operation in nccl_direct.OPERATIONS for size in sizes]
        return {form: {f"{op} {size}": 1.0 for op, size in every if not nccl_direct.left_out(form, op, size)} for form in nccl_direct.FORMS}
    devices = jax.devices(PLATFORM)
    ordinals = {devices.index(device): device.local_hardware_id for device in jax.local_devices(backend=PLATFORM)}
    found: dict[str, Any] = {}

    def say() -> None:  # lest a crash in the second form takes the first one along
        os.write(sys.stdout.fileno(), f"\nPARTIAL {json.dumps(found)}\n".encode())

    def measure() -> None:
        try:
            nccl_direct.measure(sizes, ordinals, len(devices), everyone, found, say)
        except Exception:
            found["failed"] = traceback.format_exc()[-1500:]

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(seconds)
    atexit.register(_leave)  # runs before those that are registered already
    if thread.is_alive():
        return {**copy.deepcopy(found), "failed": f"did not end within {seconds:g} s"}
    return found
