"""The benchmark of priorities measures what it says: XLA leaves all foreground operations between the background's starts and its dones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import gpu_shared
from tests.aot import schedule


@pytest.mark.parametrize("count", [1, 2])
def test_the_foreground_runs_between_the_backgrounds_start_and_done(count: int) -> None:
    mesh = schedule.mesh(x=2)
    _, both = gpu_shared.beside_background([(0, 1), (1, 0)], 50, count)
    shapes = (2, 16384), (2048, 262144)
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("x"))) for shape in shapes]
    text = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P("x"))).lower(*operands).compile().as_text()
    assert text is not None
    schedule.parse(text)  # asserts that it is a schedule
    assert gpu_shared.scheduled(text) == [f"hoccl_start {count}", "hoccl_collective 50", f"hoccl_done {count}"]
