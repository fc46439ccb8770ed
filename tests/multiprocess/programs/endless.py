"""Collectives without end, big enough for every way that data crosses processes. The test kills the job."""

from __future__ import annotations

import jax

import hoccl_jax
from tests.multiprocess.programs.common import everyone, ranks_values, report, sharded


def main() -> None:
    mesh = everyone()
    x = ranks_values(mesh, 1 << 18)
    step = sharded(mesh, lambda x: hoccl_jax.all_gather(x, "x", tiled=True)[: x.size])
    step(x).block_until_ready()
    report(running=jax.process_index())
    while True:
        step(x).block_until_ready()


if __name__ == "__main__":
    main()
