"""What a process sees of the others, and what moved the bytes of one operation."""

from __future__ import annotations

import jax

import hoccl_jax
from tests.multiprocess.programs.common import barrier, everyone, ranks_values, report, sharded


def main() -> None:
    step = sharded(everyone(), lambda x: hoccl_jax.all_gather(x, "x", tiled=True)[: x.size])
    jax.block_until_ready(step(ranks_values(everyone(), 1000)))
    topology = hoccl_jax.topology()
    report(
        nodes=[process["node"] for process in topology["processes"]],
        by_network=[process["by_network"] for process in topology["processes"]],
        transport=topology["transport"],
        bytes=hoccl_jax.stats()["bytes"],
    )
    barrier("seen")


if __name__ == "__main__":
    main()
