"""The limit of transfers between two GPUs: bare copies by the CUDA driver, through ctypes, with nothing else around them.

`pairs` measures one direction and both at once; each GPU pushes from its own stream.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Sequence
from typing import Any

_NON_BLOCKING = 1
_PEER_ACCESS_ALREADY_ENABLED = 704


class Driver:
    """The calls of libcuda that copying takes. Errors are RuntimeError with the call's name."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result not in (0, _PEER_ACCESS_ALREADY_ENABLED):
            raise RuntimeError(f"{name}: CUDA error {result}")


class Gpu:
    """A device with its primary context, a stream, two events in it and buffers of `sizes` bytes."""

    def __init__(self, driver: Driver, ordinal: int, *sizes: int):
        self._driver = driver
        device = ctypes.c_int()
        driver("cuDeviceGet", ctypes.byref(device), ordinal)
        self.context = ctypes.c_void_p()
        driver("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.use()
        self.stream, self.start, self.end = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        driver("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING)
        driver("cuEventCreate", ctypes.byref(self.start), 0)
        driver("cuEventCreate", ctypes.byref(self.end), 0)
        self.buffers = []
        for size in sizes:
            address = ctypes.c_uint64()
            driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self.buffers.append(address)

    def use(self) -> None:
        self._driver("cuCtxSetCurrent", self.context)

    def begin(self) -> None:
        self.use()
        self._driver("cuEventRecord", self.start, self.stream)

    def finish(self) -> None:
        self.use()
        self._driver("cuEventRecord", self.end, self.stream)

    def push(self, peer: Gpu, size: int, times: int) -> None:
        self.begin()
        for _ in range(times):
            self._driver("cuMemcpyAsync", peer.buffers[1], self.buffers[0], ctypes.c_size_t(size), self.stream)
        self.finish()

    def elapsed_us(self) -> float:
        """What the stream took from `begin` to `finish`; waits for it."""
        self.use()
        self._driver("cuEventSynchronize", self.end)
        milliseconds = ctypes.c_float()
        self._driver("cuEventElapsedTime", ctypes.byref(milliseconds), self.start, self.end)
        return milliseconds.value * 1e3

    def free(self) -> None:
        self.use()
        for buffer in self.buffers:
            self._driver("cuMemFree_v2", buffer)


def pairs(sizes: Sequence[int], repeats: int = 7) -> dict[str, float]:
    """us of one copy from GPU 0 to GPU 1, and of one in each direction at once."""
    driver = Driver()
    gpus = [Gpu(driver, ordinal, max(sizes), max(sizes)) for ordinal in range(2)]
    for gpu, peer in (gpus, reversed(gpus)):
        gpu.use()
        driver("cuCtxEnablePeerAccess", peer.context, 0)
    result: dict[str, float] = {}
    for size in sizes:
        times = 100 if size <= 8 << 20 else 10
        one_way, both_ways = [], []
        for _ in range(repeats):
            gpus[0].push(gpus[1], size, times)
            one_way.append(gpus[0].elapsed_us() / times)
            gpus[0].push(gpus[1], size, times)
            gpus[1].push(gpus[0], size, times)
            both_ways.append(max(gpu.elapsed_us() for gpu in gpus) / times)
        result |= {f"one way {size}": statistics.median(one_way), f"both ways {size}": statistics.median(both_ways)}
    for gpu in gpus:
        gpu.free()
    return result
