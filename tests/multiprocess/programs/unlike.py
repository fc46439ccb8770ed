"""Processes whose executables of one program are not the same to the last detail, so that XLA counts their runs from different numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import hoccl_jax
from tests.multiprocess.programs import common


def _step(x: jax.Array) -> jax.Array:
    return hoccl_jax.all_gather(x, "x", tiled=True).sum() + hoccl_jax.ppermute(x, "x", [(0, 1), (1, 2), (2, 3), (3, 0)])


def _wanted(values: np.ndarray) -> np.ndarray:
    return values.sum() + np.roll(values.reshape(4, -1), 1, axis=0).reshape(-1)


def _runs(step: Callable[[jax.Array], Any], size: int, first: int) -> list[bool]:
    mesh = common.everyone()
    right = []
    for run in range(first, first + 3):
        x = common.ranks_values(mesh, size) + run
        values = np.arange(4 * size, dtype=np.float32) + run
        result = step(x)
        right += [bool((np.asarray(s.data) == _wanted(values)[s.index]).all()) for s in result.addressable_shards]
    return right


def lines() -> list[bool]:
    """The ranks call the same program from different lines, for two shapes in turns."""
    step = common.sharded(common.everyone(), _step)

    def elsewhere(x: jax.Array) -> Any:
        return step(x)

    right = _runs(step if jax.process_index() == 0 else elsewhere, 4, 0)
    for first in (3, 6):
        right += _runs(step, 2048, first) + _runs(step, 4, first)
    return right


def cache(folder: str) -> list[bool]:
    """Only process 0 writes to JAX's persistent cache, and finds its executables there in the job's second life."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return _runs(common.sharded(common.everyone(), _step), 4, 0)


def groups() -> list[bool]:
    """Programs of one name gather in different groups: of the first nothing is said between processes, in the second process 1 is ahead."""
    mesh = common.everyone()
    x = common.ranks_values(mesh, 3)
    right = []
    for first, groups in enumerate(([[0, 1], [2, 3]], [[0, 2], [1, 3]])):
        step = common.sharded(mesh, lambda x, groups=groups: hoccl_jax.all_gather(x, "x", axis_index_groups=groups, tiled=True))
        wanted = np.stack(
            [np.concatenate([np.arange(3 * r, 3 * r + 3) for r in group]) for rank in range(4) for group in groups if rank in group]
        )
        for run in range(3):
            before = hoccl_jax.stats()["operations"]["all_gather"]
            if (first, run, jax.process_index()) == (1, 0, 0):
                common.await_event("process 1 is there")
            result = step(x)
            if (first, run, jax.process_index()) == (1, 0, 1):
                while hoccl_jax.stats()["operations"]["all_gather"] < before + 2:
                    pass
                common.announce("process 1 is there")
            right += [bool((np.asarray(s.data) == wanted.reshape(-1)[s.index]).all()) for s in result.addressable_shards]
    return right


if __name__ == "__main__":
    common.report(right=globals()[sys.argv[1]](*sys.argv[2:]), stats=hoccl_jax.stats())
