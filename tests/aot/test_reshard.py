"""`reshard` compiled for H200s: the partitioned program holds our operations, beside the program's own stream, and none of XLA's."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from hoccl_jax import primitives
from tests.aot import schedule

FOREIGN = r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("


@pytest.mark.parametrize(
    ("source", "target"), [(P("a"), P()), (P("a"), P(None, "a")), (P(("a", "b")), P(("b", "a"))), (P("b"), P("a", "b"))], ids=str
)
def test_there_and_back(source: P, target: P) -> None:
    mesh = schedule.mesh(a=2, b=4)

    def there_and_back(x: jax.Array) -> jax.Array:
        y, pull = jax.vjp(lambda x: hoccl_jax.reshard(x, NamedSharding(mesh, target)), x)
        return pull(y * y)[0]

    x = jax.ShapeDtypeStruct((1024, 1024), np.float32, sharding=NamedSharding(mesh, source))
    text = str(jax.jit(there_and_back, out_shardings=NamedSharding(mesh, source)).lower(x).compile().as_text())
    assert re.findall(FOREIGN, text) == []
    assert text.count(f'custom_call_target="{primitives.TARGET}"') >= 1
    assert "call-start" in text
