"""Many independent collectives in one program, mixed with XLA's own: XLA:CPU runs them in any order, on each rank in another."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax
from tests.multiprocess.programs.common import everyone, ranks_values, report

_COLLECTIVES = 40
_SUMS = 8


def program(x: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Everything depends on the operand alone."""
    n = jax.lax.axis_size("x")
    kinds = [
        lambda y: hoccl_jax.all_gather(y, "x", tiled=True),
        lambda y: hoccl_jax.all_to_all(y, "x", 0, 0, tiled=True),
        lambda y: hoccl_jax.ppermute(y, "x", [(i, (i + 1) % n) for i in range(n)]),
        lambda y: hoccl_jax.all_gather(y, "x", axis_index_groups=[list(range(0, n, 2)), list(range(1, n, 2))], tiled=True),
    ]
    return [kinds[i % len(kinds)](x + i) for i in range(_COLLECTIVES)], [jax.lax.psum(x * i, "x") for i in range(_SUMS)]


def expected(values: np.ndarray, rank: int, i: int) -> np.ndarray:
    """The result of collective `i` on `rank`, from all ranks' operands: `values` is [ranks, elements]."""
    n = len(values)
    if i % 4 == 0:
        result = values.ravel()
    elif i % 4 == 1:
        result = values.reshape(n, n, -1)[:, rank].ravel()
    elif i % 4 == 2:
        result = values[(rank - 1) % n]
    else:
        result = values[rank % 2 :: 2].ravel()
    return result + i


def differences(mesh: Mesh, per_chunk: int, rounds: int) -> list[str]:
    n = mesh.devices.size
    x = ranks_values(mesh, n * per_chunk, np.int32)
    values = np.arange(x.size, dtype=np.int32).reshape(n, -1)
    specs = ([P("x")] * _COLLECTIVES, [P()] * _SUMS)
    step = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=specs))
    wrong: list[str] = []
    for r in range(rounds):
        results, sums = jax.block_until_ready(step(x))
        for i, result in enumerate(results):
            for shard in result.addressable_shards:
                rank = list(mesh.devices.flat).index(shard.device)
                if not np.array_equal(np.asarray(shard.data), expected(values, rank, i)):
                    wrong.append(f"{per_chunk} elements, round {r}, collective {i}, rank {rank}")
        wrong += [f"round {r}, sum {i}" for i, total in enumerate(sums) if not np.array_equal(np.asarray(total), values.sum(axis=0) * i)]
    return wrong


def main(sizes: list[str]) -> None:
    """`sizes`: elements for each pair of ranks, and rounds, as "4:10"."""
    mesh = everyone()
    wrong = [difference for size in sizes for difference in differences(mesh, *map(int, size.split(":")))]
    report(wrong=wrong, stats=hoccl_jax.stats())


if __name__ == "__main__":
    main(sys.argv[1:])
