"""What crosses processes beside the collectives of jax.lax: resharding, exchanges, and messages, also between programs that differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from tests.multiprocess.programs.common import mesh_of, report


def check(wrong: list[str], name: str, given: jax.Array, expected: np.ndarray) -> None:
    """Do the shards of this process hold their part of `expected`?"""
    if not all(np.array_equal(np.asarray(shard.data), expected[shard.index]) for shard in given.addressable_shards):
        wrong.append(name)


def placed(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def reshardings(wrong: list[str]) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("a", "b"))
    other = Mesh(mesh.devices[::-1, ::-1], ("a", "b"))
    values = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    changes = [(P("a"), P()), (P("a", "b"), P("b", "a")), (P(("a", "b")), P(("b", "a"))), (P("a"), P(None, "a")), (P(), P("b"))]
    for source, target in changes:
        x, bar = placed(values, NamedSharding(mesh, source)), placed(-values, NamedSharding(mesh, target))

        def there_and_back(x: jax.Array, bar: jax.Array, target: P = target) -> Any:
            y, pull = jax.vjp(lambda x: hoccl_jax.reshard(x, NamedSharding(mesh, target)), x)
            return y, pull(bar)[0]

        y, x_bar = jax.block_until_ready(jax.jit(there_and_back)(x, bar))
        if not (y.sharding.is_equivalent_to(bar.sharding, 2) and x_bar.sharding.is_equivalent_to(x.sharding, 2)):
            wrong.append(f"sharding of {source} to {target}")
        check(wrong, f"{source} to {target}", y, values)
        check(wrong, f"{source} to {target}, back", x_bar, -values)
        moved = hoccl_jax.reshard(x, NamedSharding(other, source))
        check(wrong, f"{source} on other devices", jax.block_until_ready(moved), values)


def exchanges(wrong: list[str]) -> None:
    mesh = mesh_of(range(jax.process_count()))
    n = mesh.size
    values = np.arange(n * n * 1000, dtype=np.float32).reshape(n * n, 1000)
    x = placed(values, NamedSharding(mesh, P("x")))
    flows = [(rank, n - 1 - rank, row, n - 1 - row, 1) for rank in range(n) for row in range(n)]

    def body(x: jax.Array) -> Any:
        size, at = jnp.ones(n, jnp.int32), jnp.arange(n, dtype=jnp.int32)
        to = jnp.full(n, jax.lax.axis_index("x"), jnp.int32)
        return hoccl_jax.exchange(x, "x", flows), hoccl_jax.ragged_all_to_all(x, 0 * x, at, size, to, size, axis_name="x")

    flipped, crossed = jax.block_until_ready(jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x))
    check(wrong, "exchange", flipped, values[::-1])
    check(wrong, "ragged_all_to_all", crossed, values.reshape(n, n, -1).swapaxes(0, 1).reshape(values.shape))


def messages_in_halves(wrong: list[str]) -> None:
    """Round a ring both ways. All receives are started before anything is sent, and awaited in the opposite order."""
    mesh = mesh_of(range(jax.process_count()))
    n = mesh.size
    values = np.arange(n * 1000, dtype=np.float32).reshape(n, 1000)
    ring = [(rank, (rank + 1) % n) for rank in range(n)]
    back = [(dst, src) for src, dst in ring]

    def body(x: jax.Array) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        futures = [hoccl_jax.precv_start(jax.lax.create_token(), like, "x", perm) for perm in (ring, back, ring)]
        futures, x = jax.lax.optimization_barrier((futures, x))
        for factor, perm in ((1, back), (2, ring), (3, ring)):
            hoccl_jax.psend_start(factor * x, "x", perm).done()
        last, second, first = (future.done() for future in reversed(futures))
        return first, second, last

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    received = jax.block_until_ready(program(placed(values, NamedSharding(mesh, P("x")))))
    for name, given, factor, step in zip(("first", "second", "last"), received, (2, 1, 3), (1, -1, 1), strict=True):
        check(wrong, f"{name} message in halves", given, factor * np.roll(values, step, axis=0))


def messages(wrong: list[str]) -> None:
    """The first process and the others run other programs, each on its own devices."""
    me, everybody = jax.process_index(), jax.process_count()
    own = jax.local_devices()
    like = jax.ShapeDtypeStruct((1000,), np.float32)
    # Each process swaps with every other: all send first, with many tags, received in the opposite order.
    others = [process for process in range(everybody) if process != me]
    first = {device.process_index: device for device in reversed(jax.devices())}

    def swap(x: jax.Array) -> dict[int, jax.Array]:
        for process in others:
            for tag in range(4):
                hoccl_jax.send(x + tag, first[process], tag=tag)
        return {process: jnp.stack([0 * x + hoccl_jax.recv(like, first[process], tag=tag) for tag in (3, 2, 1, 0)]) for process in others}

    received = jax.jit(swap)(jax.device_put(np.full(1000, 10.0 * me, np.float32), own[0]))
    for process, values in received.items():
        check(wrong, f"swap with {process}", values, np.repeat([[10.0 * process + tag] for tag in (3, 2, 1, 0)], 1000, axis=1))
    # Two stages of several devices: the answer comes back.
    if me > 1:
        return
    mesh, peers = Mesh(np.array(own), "x"), [device for device in jax.devices() if device.process_index == 1 - me]
    values = np.arange(1000.0 * len(own), dtype=np.float32)

    def ask(x: jax.Array) -> jax.Array:
        hoccl_jax.send(2 * x, peers, tag=1)
        return x + hoccl_jax.recv(like, peers, tag=2)

    def answer(x: jax.Array) -> jax.Array:
        question = hoccl_jax.recv(like, peers, tag=1)
        hoccl_jax.send(question + 1, peers, tag=2)
        return question + 0 * x

    program = jax.shard_map(answer if me else ask, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    result = jax.block_until_ready(jax.jit(program)(placed(values, NamedSharding(mesh, P("x")))))
    check(wrong, "stages", result, 2 * values if me else 3 * values + 1)


def main() -> None:
    hoccl_jax.init()
    wrong: list[str] = []
    for part in (reshardings, exchanges, messages_in_halves, messages):
        part(wrong)
    report(wrong=wrong, stats=hoccl_jax.stats())


if __name__ == "__main__":
    main()
