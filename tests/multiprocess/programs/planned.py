"""Large collectives over several nodes against jax.lax, with a trace of each: `planned.py FOLDER`. Ranks report what differed."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import hoccl_jax
from tests.multiprocess.programs.common import barrier, everyone, ranks_values, report, sharded

_PER_RANK = 2 << 20  # float32


def main(folder: str) -> None:
    mesh = everyone()
    n = mesh.devices.size
    ring = [(rank, (rank + 1) % n) for rank in range(n)]
    x = ranks_values(mesh, _PER_RANK)
    operations: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
        "all_gather": lambda module: lambda x: module.all_gather(x, "x", tiled=True),
        "all_to_all": lambda module: lambda x: module.all_to_all(x, "x", 0, 0, tiled=True),
        "ppermute": lambda module: lambda x: module.ppermute(x, "x", ring),
    }
    wrong = []
    for name, of in operations.items():
        program = sharded(mesh, of(hoccl_jax), name)
        jax.block_until_ready(program(x))
        with hoccl_jax.trace(pathlib.Path(folder) / f"{name}.json"):
            result = jax.block_until_ready(program(x))
            barrier("traced")  # what is forwarded for others is in the trace too
        expected = sharded(mesh, of(jax.lax), f"{name}_lax")(x)
        pairs = zip(result.addressable_shards, expected.addressable_shards, strict=True)
        wrong += [name for ours, theirs in pairs if not np.array_equal(np.asarray(ours.data), np.asarray(theirs.data))]
    report(wrong=wrong, stats=hoccl_jax.stats())


if __name__ == "__main__":
    main(sys.argv[1])
