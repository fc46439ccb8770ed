"""CPU time that moving data between hosts takes, in all threads, user and system: one rank of `benchmarks.network_cases.cpu_seconds`.

`network_load LIBRARY OPERATION BYTES CALLS` runs an operation so many times and prints the CPU seconds of this process.
"""

from __future__ import annotations

import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh

import hoccl_jax
from benchmarks import collectives


def cpu() -> float:
    times = os.times()
    return times.user + times.system


def main(library: str, operation: str, size: int, calls: int) -> None:
    mesh = Mesh(np.array(jax.devices()), "x")
    barrier = collectives.make_barrier(mesh)
    x = collectives.operand(operation, size, mesh)
    step = collectives.jitted({"hoccl": hoccl_jax, "lax": jax.lax}[library], operation, mesh)
    collectives.timed(step, x, 2)
    barrier()
    start = cpu()
    collectives.timed(step, x, calls)
    used = cpu() - start
    barrier()
    print(f"CPU {used}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
