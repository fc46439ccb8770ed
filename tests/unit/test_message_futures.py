"""Messages in two halves: sends and receives meet in order, whole or in halves, and what goes wrong is an error that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax
from tests.futures import PART, RING, assert_same, carried_plain, exact, mesh, operand, run

_BACK = tuple((dst, src) for src, dst in RING)


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def sent(x: Any, perm: Any = RING) -> Any:
    """The token of a send in two halves."""
    return hoccl_jax.psend_start(x, "x", perm).done()


def received(token: Any, x: jax.Array, perm: Any = RING, **options: Any) -> hoccl_jax.Future:
    return hoccl_jax.precv_start(token, like(x), "x", perm, **options)


def no_token() -> Any:
    return lax.create_token()


@pytest.mark.parametrize("perm", [RING, PART, [(0, 0), (1, 2)], []])
@pytest.mark.parametrize("priority", ["foreground", "background"])
def test_a_message_in_halves_equals_a_permutation(perm: Any, priority: Any) -> None:
    def body(x: jax.Array) -> Any:
        token, y = hoccl_jax.overlap(hoccl_jax.psend_start(x, "x", perm, priority=priority), exact, x)
        future = received(token, x, perm, priority=priority)
        message, z = hoccl_jax.overlap(future, exact, y)
        return (message, z), (lax.ppermute(x, "x", perm), exact(exact(x)))

    assert_same(*run(body, operand(8, 4), check_vma=False))


@pytest.mark.parametrize("dtype", [jnp.int4, bool, jnp.bfloat16, jnp.float4_e2m1fn])
def test_halves_and_whole_messages_meet_whatever_the_type(dtype: Any) -> None:
    def body(x: jax.Array) -> Any:
        y = x.astype(dtype)
        halves = received(hoccl_jax.psend(y, "x", RING), y).done()
        whole = hoccl_jax.precv(sent(y, _BACK), like(y), "x", _BACK)
        wanted = lax.ppermute(y, "x", RING), lax.ppermute(y, "x", _BACK)
        assert halves.dtype == whole.dtype == y.dtype
        return jax.tree.map(lambda z: z.astype(np.float32), [(halves, whole), wanted])

    assert_same(*run(body, operand(6), check_vma=False))


def test_the_kth_receive_takes_the_kth_equal_send_however_they_are_written() -> None:
    def body(x: jax.Array) -> Any:
        early = received(no_token(), x)  # of x, which has not been sent
        tokens = [hoccl_jax.psend(x, "x", RING), sent(2 * x), sent(3 * x, _BACK), sent(4 * x)]
        second = received(tokens[0], x)  # of 2 * x, whose token it does not have
        third = hoccl_jax.precv(tokens[3], like(x), "x", RING)
        back = received(tokens[0], x, _BACK)
        messages = back.done(), third, second.done(), early.done()  # in another order than they come
        wanted = [lax.ppermute(factor * x, "x", perm) for factor, perm in ((3, _BACK), (4, RING), (2, RING), (1, RING))]
        return messages, tuple(wanted)

    assert_same(*run(body, operand(1000), check_vma=False))


@pytest.mark.parametrize("elements", [4, 1 << 16])
def test_a_receive_that_is_started_before_its_send_ends_after_it(elements: int) -> None:
    """XLA sees no dependence between them but the order of tracing; small programs run one call after the other."""

    def body(x: jax.Array) -> Any:
        futures = [received(no_token(), x) for _ in range(8)]
        results = []
        y = x
        for future in futures:
            sent(y)
            y = future.done() + x
            results.append(y)
        wanted = []
        y = x
        for _ in futures:
            y = lax.ppermute(y, "x", RING) + x
            wanted.append(y)
        return results, wanted

    for _ in range(3):
        assert_same(*run(body, operand(elements), check_vma=False))


def test_messages_in_halves_within_loops_and_branches() -> None:
    def step(x: jax.Array, perm: Any) -> jax.Array:
        future = received(no_token(), x, perm)
        hoccl_jax.psend(x, "x", perm)
        message, y = hoccl_jax.overlap(future, exact, x)
        return message + y

    def body(x: jax.Array) -> Any:
        loop = lax.scan(lambda x, _: (step(x, RING), None), x, length=3)[0]
        branch = lax.cond(jnp.sum(0 * x) == 0, lambda x: step(x, RING), lambda x: step(x, _BACK), x)
        wanted = x
        for _ in range(3):
            wanted = lax.ppermute(wanted, "x", RING) + exact(wanted)
        return (loop, branch), (wanted, lax.ppermute(x, "x", RING) + exact(x))

    for _ in range(2):
        assert_same(*run(body, operand(8, 4), check_vma=False))


def test_a_pytree_of_sends_has_a_token_for_each() -> None:
    def body(x: jax.Array) -> Any:
        tokens = sent({"a": x, "b": x[0]})
        return (received(tokens["b"], x[0]).done(), received(tokens["a"], x).done()), jax.tree.map(
            lambda y: lax.ppermute(y, "x", RING), (x[0], x)
        )

    assert_same(*run(body, operand(3, 2), check_vma=False))


def test_a_message_that_nobody_looks_at_is_received_all_the_same() -> None:
    def body(x: jax.Array) -> jax.Array:
        received(sent(x), x).done()
        return x

    hoccl_jax.init()
    hoccl_jax.reset_stats()
    x = operand(8)
    assert_same(run(body, x, check_vma=False), x)
    operations = hoccl_jax.stats()["operations"]
    assert (operations["send"], operations["recv"]) == (4, 4)


def test_staged_receives_go_through_loops_and_jit() -> None:
    """Each round awaits what the one before it started."""

    def carried(x: jax.Array) -> Any:
        def step(future: hoccl_jax.Future, scale: jax.Array) -> Any:
            y = future.done() * scale
            return received(sent(y), y, staged=True), y

        first = jax.jit(lambda x: received(sent(x), x, staged=True))(x)
        last, results = lax.scan(step, first, jnp.arange(1.0, 4.0))
        return results, last.done()

    def body(x: jax.Array) -> Any:
        wanted = carried_plain(x)
        return carried(x), (wanted, lax.ppermute(wanted[-1], "x", RING))

    for _ in range(3):
        assert_same(*run(body, operand(4, 3), check_vma=False))


def test_a_received_message_is_a_constant_beside_what_is_differentiated() -> None:
    def body(x: jax.Array) -> Any:
        def loss(y: jax.Array) -> jax.Array:
            message, z = hoccl_jax.overlap(received(sent(x), x), exact, y)
            return jnp.sum(message * z)

        return jax.grad(loss)(x), jax.grad(lambda y: jnp.sum(lax.ppermute(x, "x", RING) * exact(y)))(x)

    assert_same(*run(body, operand(8), check_vma=False))


def test_messages_in_halves_have_no_gradient_and_no_vmap() -> None:
    with pytest.raises(NotImplementedError, match="Differentiation rule for 'hoccl_psend_start' not implemented"):
        run(lambda x: jax.jvp(lambda x: received(sent(x), x).done(), (x,), (x,)), operand(8), check_vma=False)
    with pytest.raises(NotImplementedError, match="psend_start under vmap"):
        run(lambda x: jax.vmap(lambda x: received(sent(x), x).done())(x), operand(8, 4), check_vma=False)


def test_disabled_messages_are_as_limited_as_in_jax_lax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCCL_DISABLE", "1")
    with pytest.raises(NotImplementedError, match="psend is currently only implemented on GPU"):
        run(lambda x: received(sent(x), x).done(), operand(8), check_vma=False)


def send_twice(x: jax.Array) -> Any:
    future = hoccl_jax.psend_start(x, "x", RING)
    return received(future.done(), x).done(), received(future.done(), x).done()


def send_twice_as_a_pytree(x: jax.Array) -> Any:
    future = hoccl_jax.psend_start(x, "x", RING)
    tokens = future.done(), jax.tree.map(lambda leaf: leaf, future).done()
    return received(tokens[1], x).done()


def receive_twice_as_a_pytree(x: jax.Array) -> Any:
    future = received(sent(x), x)
    return future.done() + jax.tree.map(lambda leaf: leaf, future).done()


def send_out_of_jit(x: jax.Array) -> Any:
    future = jax.jit(lambda x: hoccl_jax.psend_start(x, "x", RING))(x)
    return received(future.done(), x).done()


def receive_out_of_jit(x: jax.Array) -> Any:
    return jax.jit(lambda x: received(sent(x), x))(x).done()


def receive_into_jit(x: jax.Array) -> Any:
    return jax.jit(lambda future: future.done())(received(sent(x), x))


def receive_into_scan(x: jax.Array) -> Any:
    future = received(sent(x), x)
    return lax.scan(lambda carry, _: (carry + future.done(), None), x, length=2)[0]


def receive_carried_by_scan(x: jax.Array) -> Any:
    def step(future: hoccl_jax.Future, _: Any) -> Any:
        y = future.done()
        return received(sent(y), y), None

    return lax.scan(step, received(sent(x), x), length=2)[0].done()


def receive_into_cond(x: jax.Array) -> Any:
    future = received(sent(x), x)
    return lax.cond(jnp.sum(x) > 0, lambda future: future.done(), lambda future: -future.done(), future)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (send_twice, "has been used already"),
        (send_twice_as_a_pytree, "has been used already"),
        (receive_twice_as_a_pytree, "has been used already"),
        (send_out_of_jit, "comes from another function"),
        (receive_out_of_jit, "comes from another function"),
        (receive_into_jit, "comes from another function"),
        (receive_into_scan, "comes from another function"),
        (receive_carried_by_scan, "comes from another function"),
        (receive_into_cond, "comes from another function"),
    ],
)
def test_the_future_of_a_message_in_the_wrong_place_does_not_compile(function: Callable[[jax.Array], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(function, operand(8), check_vma=False)


def drop_a_send(x: jax.Array) -> None:
    hoccl_jax.psend_start(x, "x", RING)


def drop_a_receive(x: jax.Array) -> None:
    received(sent(x), x)


@pytest.mark.parametrize(("function", "kind", "sends"), [(drop_a_send, "send", 0), (drop_a_receive, "recv", 4)])
def test_a_half_message_that_nothing_awaits_is_an_error(function: Callable[[jax.Array], None], kind: str, sends: int) -> None:
    """It alone: its other side has the same number, and is a call of its own."""
    hoccl_jax.init()
    hoccl_jax.reset_stats()

    def body(x: jax.Array) -> jax.Array:
        function(x)
        return x

    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"start of {kind} .*: nothing in this compiled program awaits its future"):
        jax.block_until_ready(run(body, operand(8), check_vma=False))
    operations = hoccl_jax.stats()["operations"]
    assert (operations["send"], operations["recv"]) == (sends, 0)


def test_a_receive_that_would_wait_in_vain_is_refused() -> None:
    """One that is started before the send of its message is not."""

    def start_early(x: jax.Array) -> Any:
        first = sent(x[:2])
        future = received(first, x)
        second = sent(x)
        return future.done(), received(second, x[:2]).done()

    def body(x: jax.Array) -> Any:
        return start_early(x), (lax.ppermute(x, "x", RING), lax.ppermute(x[:2], "x", RING))

    assert_same(*run(body, operand(5), check_vma=False))
    for token in (sent, lambda x: hoccl_jax.psend(x, "x", RING)):
        with pytest.raises(ValueError, match=r"precv: out_shape is float32\[5\], but the psend of its token sends float32\[2\]"):
            run(lambda x, token=token: received(token(x[:2]), x).done(), operand(5), check_vma=False)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_messages_of_a_function_that_jax_lowers_once_are_told_apart_or_refused(wrap: Callable[..., Any]) -> None:
    @wrap
    def send(x: jax.Array) -> Any:
        hoccl_jax.psend(x, "x", RING)
        return x * 10

    def body(x: jax.Array) -> jax.Array:
        sent(send(send(x)))
        first = received(no_token(), x).done()
        return 1000 * first + received(no_token(), x).done()

    with pytest.raises(NotImplementedError, match=r"psend in function '.*' \(run 2x\) and its precv in '.*' \(run 1x\)"):
        run(body, operand(3), check_vma=False)

    @wrap
    def permute(x: jax.Array) -> Any:
        return hoccl_jax.precv(hoccl_jax.psend(x, "x", RING), x, "x", RING)

    def permutes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = permute(permute(x) + 1)
        third = received(sent(y), y).done()
        return third, lax.ppermute(lax.ppermute(lax.ppermute(x, "x", RING) + 1, "x", RING), "x", RING)

    assert_same(*run(permutes, operand(3), check_vma=False))


def test_keys_are_sent_in_halves_and_received_as_a_whole() -> None:
    def body(x: jax.Array) -> Any:
        keys = jax.random.wrap_key_data(x)
        token, _ = hoccl_jax.overlap(hoccl_jax.psend_start(keys, "x", RING), jnp.square, x)
        return jax.random.key_data(hoccl_jax.precv(token, keys, "x", RING)), lax.ppermute(x, "x", RING)

    assert_same(*run(body, operand(3, 2, dtype=np.uint32), check_vma=False))
    key = jax.random.key(0)
    with pytest.raises(NotImplementedError, match=r"precv_start of key.*: a message of keys is received as a whole, by precv"):
        run(lambda x: received(no_token(), jnp.broadcast_to(key, x.shape)).done(), operand(2), check_vma=False)


@pytest.mark.parametrize("staged", [False, True])
def test_a_mesh_axis_that_is_left_to_xla_is_an_error(staged: bool) -> None:
    """XLA's partitioner takes no calls with side effects; some versions crash on them."""
    two = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    swap = [(0, 1), (1, 0)]

    def refused(name: str, body: Callable[[jax.Array], jax.Array]) -> None:
        program = jax.jit(jax.shard_map(body, mesh=two, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False))
        with pytest.raises(NotImplementedError, match=rf"{name} in a shard_map that leaves mesh axes \('y',\) to XLA's partitioner"):
            program(np.ones((4, 4), np.float32))

    refused("ppermute_start", lambda x: hoccl_jax.ppermute_start(x, "x", swap, staged=staged).done())
    refused("psend", lambda x: lax.optimization_barrier((hoccl_jax.psend_start(x, "x", swap).done(), x))[1])
    refused("precv", lambda x: hoccl_jax.precv_start(lax.create_token(), x, "x", swap, staged=staged).done())
    refused("psend", lambda x: hoccl_jax.precv(hoccl_jax.psend(x, "x", swap), x, "x", swap))


def test_what_is_received_varies() -> None:
    """Its type under check_vma says so, and gradients beside it are right: a message is a constant, one of each rank's own."""

    def received(x: jax.Array) -> jax.Array:
        return hoccl_jax.precv(hoccl_jax.psend(x, "x", RING), x, "x", RING)

    def received_by_halves(x: jax.Array) -> jax.Array:
        return hoccl_jax.precv_start(hoccl_jax.psend(x, "x", RING), x, "x", RING).done()

    x = np.arange(8.0, dtype=np.float32).reshape(8, 1)
    for function in (received, received_by_halves):
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(jax.shard_map(function, mesh=mesh(), in_specs=P("x"), out_specs=P()))(x)

        def loss(w: jax.Array, x: jax.Array, function: Callable[[jax.Array], jax.Array] = function) -> jax.Array:
            def body(w: jax.Array, x: jax.Array) -> jax.Array:
                return lax.psum(function(lax.stop_gradient(x)).sum() * w, "x")

            return jax.shard_map(body, mesh=mesh(), in_specs=(P(), P("x")), out_specs=P())(w, x)

        assert jax.jit(jax.grad(loss))(2.0, x) == x.sum()


def test_tokens_that_are_none() -> None:
    like = jax.ShapeDtypeStruct((2,), np.float32)

    def with_token(receive: Callable[..., Any], token: Callable[[jax.Array], Any]) -> None:
        jax.jit(jax.shard_map(lambda x: receive(token(x), like, "x", RING), mesh=mesh(), in_specs=P("x"), out_specs=P("x")))(
            np.ones(8, np.float32)
        )

    def start(*arguments: Any) -> Any:
        return hoccl_jax.precv_start(*arguments).done()

    for receive in (hoccl_jax.precv, start):
        for token, got in (
            (lambda x: None, "got None"),
            (lambda x: x, r"got float32\[2\]"),
            (lambda x: hoccl_jax.psend_start(x, "x", RING), "got u?int8"),
        ):
            with pytest.raises(TypeError, match=f"precv.*: token must be one that psend.* {got}"):
                with_token(receive, token)
    with pytest.raises(TypeError, match="overlap: future must be a Future"):
        hoccl_jax.overlap(np.ones(3), np.negative, np.ones(3))


def test_a_staged_receive_of_another_shape_than_its_psend_is_an_error() -> None:
    def body(x: jax.Array) -> jax.Array:
        other = jax.ShapeDtypeStruct((3, 1), x.dtype)
        return hoccl_jax.precv_start(hoccl_jax.psend(x, "x", RING), other, "x", RING, staged=True).done()

    with pytest.raises(ValueError, match=r"precv: out_shape is float32\[3, 1\], but the psend of its token sends float32\[2, 1\]"):
        jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=P("x"), out_specs=P("x")))(np.ones((8, 1), np.float32))
