"""Every operation runs beside the computation that doesn't depend on it, and as far ahead of its use as the program allows."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import hoccl_jax
from tests.aot import schedule

_WIDTH = 4096
_LAYERS = 4
_FLOWS = [hoccl_jax.Flow(0, 1, 0, 8, 16), hoccl_jax.Flow(1, 0, 64, 32, 8), hoccl_jax.Flow(1, 1, 0, 0, 8)]


def gather(shard: jax.Array, overlap: bool | None = None) -> jax.Array:
    return hoccl_jax.all_gather(shard, "x", tiled=True, overlap=overlap)


def network(x: jax.Array, shards: jax.Array) -> jax.Array:
    """Gathers as written, just before their use."""
    for shard in shards:
        x = jnp.tanh(x @ gather(shard))
    return x


def bounded(x: jax.Array, shards: jax.Array) -> jax.Array:
    """Each layer is gathered during the one before it, and no earlier."""
    ahead = gather(shards[0])
    for layer in range(_LAYERS):
        weights = ahead
        if layer + 1 < _LAYERS:
            shard, x = hoccl_jax.prefetch_barrier(shards[layer + 1], x)
            ahead = gather(shard)
        x = jnp.tanh(x @ weights)
    return x


def compiled(function: Callable[..., object]) -> schedule.Schedule:
    specs = P("x"), P(None, "x")
    return schedule.compiled(function, schedule.mesh(x=2), specs, specs[0], (2 * _WIDTH, _WIDTH), (_LAYERS, _WIDTH, _WIDTH))


def test_xla_gathers_ahead() -> None:
    """Without a barrier, as far as it likes: the last gather starts before the first product."""
    first, *_, last = compiled(network).transfers()
    assert (first, last) == (0, _LAYERS - 1)


def test_a_barrier_bounds_the_prefetch_to_one_layer() -> None:
    found = compiled(bounded)
    assert found.transfers() == [0, 1, 1, 1]
    assert not found.copies()


@pytest.mark.parametrize("how", ["argument", "setting"])
def test_overlap_can_be_turned_off(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: jax.Array, shards: jax.Array) -> jax.Array:
        return jnp.tanh(x @ (gather(shards[0], overlap=False) if how == "argument" else gather(shards[0])))

    if how == "setting":
        monkeypatch.setenv("HOCCL_OVERLAP", "0")
    found = compiled(function)
    assert found.transfers() == []
    assert len(found.custom_calls("hoccl_collective")) == 1


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: hoccl_jax.all_gather(x, "x"),
        lambda x: hoccl_jax.all_to_all(x, "x", 0, 1, tiled=True),
        lambda x: hoccl_jax.ppermute(x, "x", [(0, 1), (1, 0)]),
        lambda x: hoccl_jax.pshuffle(x, "x", [1, 0]),
        lambda x: hoccl_jax.pbroadcast(x, "x", 1),
        lambda x: hoccl_jax.exchange(x, "x", _FLOWS),
    ],
    ids=["all_gather", "all_to_all", "ppermute", "pshuffle", "pbroadcast", "exchange"],
)
def test_every_operation_overlaps(operation: Callable[[jax.Array], jax.Array]) -> None:
    def function(x: jax.Array, shards: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x.T @ x, operation(shards[0])

    found = compiled(function)
    assert found.transfers() == [1]
    assert not found.copies()


def test_a_ragged_all_to_all_overlaps_in_place() -> None:
    """It is two operations, of which the first gathers the sizes."""

    def function(x: jax.Array, shards: jax.Array) -> tuple[jax.Array, jax.Array]:
        sizes = jnp.array([8, 16], jnp.int32)
        return x.T @ x, hoccl_jax.ragged_all_to_all(shards[0], jnp.zeros_like(x), sizes, sizes, sizes, sizes, axis_name="x")

    found = compiled(function)
    assert sum(found.transfers()) == 1
    assert len(found.transfers()) == 2
    assert not found.copies()


def test_sends_and_receives_keep_their_order() -> None:
    """They stay in the program's own stream."""

    def function(x: jax.Array, shards: jax.Array) -> tuple[jax.Array, ...]:
        received = []
        for shard in shards[:2]:
            token = hoccl_jax.psend(shard, "x", [(0, 1), (1, 0)])
            received.append(hoccl_jax.precv(token, jax.ShapeDtypeStruct(shard.shape, shard.dtype), "x", [(0, 1), (1, 0)]))
        return x.T @ x, *received

    found = compiled(function)
    kinds = [kind for i in found.custom_calls("hoccl_collective") for kind in re.findall(r'kind = "(\w+)"', i.text)]
    assert sorted(kinds) == ["recv", "recv", "send", "send"]
    assert (kinds[0], kinds[-1]) == ("send", "recv")
    assert found.transfers() == []


@pytest.mark.parametrize("dtype", ["int4", "uint2", "float4_e2m1fn"])
def test_types_narrower_than_a_byte_are_converted_in_the_programs_own_stream(dtype: str) -> None:
    def function(x: jax.Array, shards: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x.T @ x, hoccl_jax.pshuffle(shards[0].astype(dtype), "x", [1, 0]).astype(jnp.float32)

    assert len(compiled(function).transfers()) == 1


def test_foreground_and_background_have_streams_of_their_own() -> None:
    def function(x: jax.Array, shards: jax.Array) -> jax.Array:
        background = hoccl_jax.all_gather(shards[0], "x", tiled=True, priority="background")
        return x @ gather(shards[1]) @ background

    found = compiled(function)
    starts = [i.text for i in found.computations[found.entry] if i.opcode == "call-start"]
    assert sorted(stream for text in starts for stream in "12" if f'_xla_stream_annotation="{stream}"' in text) == ["1", "2"]


def test_in_a_loop_the_next_layer_comes_through_the_carry() -> None:
    def function(x: jax.Array, shards: jax.Array) -> jax.Array:
        def layer(carry: tuple[jax.Array, jax.Array], shard: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            x, weights = carry
            shard, x = hoccl_jax.prefetch_barrier(shard, x)
            ahead = gather(shard)
            return (jnp.tanh(x @ weights), ahead), None

        (x, weights), _ = jax.lax.scan(layer, (x, gather(shards[0])), shards[1:])
        return jnp.tanh(x @ weights)

    found = compiled(function)
    (body,) = found.loops(1)
    assert found.transfers(body) == [1]


def test_constants_may_be_operands() -> None:
    """XLA moves them into what another stream runs, under names that the assembler refuses."""

    def function(x: jax.Array, shards: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5)), jnp.float32)
        return x.T @ x, hoccl_jax.all_gather(numbers, "x")

    assert compiled(function).transfers() == [1]


def test_calls_that_replace_rows_share_no_buffer() -> None:
    """Each result has memory of its own, which XLA would not see to in what another stream runs."""

    def function(x: jax.Array, shards: jax.Array) -> tuple[jax.Array, ...]:
        def swapped(rows: jax.Array) -> jax.Array:
            return hoccl_jax.exchange(rows, "x", [hoccl_jax.Flow(0, 1, 0, 0, 8), hoccl_jax.Flow(1, 0, 0, 0, 8)], rows=16)

        return x.T @ x, swapped(shards[0]), swapped(shards[1])

    found = compiled(function)
    assert len(found.transfers()) == 2
    calls = found.custom_calls("hoccl_collective")
    assert len(calls) == 2
    assert not any("output_to_operand_aliasing" in call.text for call in calls)
