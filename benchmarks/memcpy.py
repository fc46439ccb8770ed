"""The limit that the hardware sets on copying collectives: a plain memcpy by all cores."""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import time

import numpy as np


class Memcpy:
    """Copies `size` bytes between two buffers of its own, touched beforehand, each core its contiguous share."""

    def __init__(self, size: int):
        cores = len(os.sched_getaffinity(0))
        self._pool = concurrent.futures.ThreadPoolExecutor(cores)
        self._sources = [_buffer(size // cores, 1) for _ in range(cores)]
        self._targets = [_buffer(size // cores, 2) for _ in range(cores)]

    def seconds(self) -> float:
        """Runs one copy and returns its time. numpy's copies don't hold the interpreter's lock, so the threads run side by side."""
        start = time.perf_counter()
        concurrent.futures.wait([self._pool.submit(np.copyto, t, s) for t, s in zip(self._targets, self._sources, strict=True)])
        return time.perf_counter() - start

    def close(self) -> None:
        self._pool.shutdown()


def _buffer(size: int, value: int) -> np.ndarray:
    """Memory straight from the kernel, in huge pages where it has them: the limit must not depend on the allocator's settings."""
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array.fill(value)
    return array
