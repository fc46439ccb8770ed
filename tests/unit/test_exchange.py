"""`exchange` and `ragged_all_to_all`: tables of flows, known when the program is written and known when it runs."""

from __future__ import annotations

import functools
import random
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
from hoccl_jax import Flow, ragged

RANKS, ROWS, WIDTH = 4, 6, 3


def on_ranks(body: Callable[..., Any], *args: Any, check_vma: bool = True) -> Any:
    """Runs on arrays whose leading dimension numbers the ranks, which get it away."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), "x")

    def strip(*args: Any) -> Any:
        return jax.tree.map(lambda y: y[None], body(*[x[0] for x in args]))

    program = jax.jit(jax.shard_map(strip, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma))
    return jax.tree.map(np.asarray, jax.block_until_ready(program(*args)))


def counted(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return 1 + np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def applied(flows: list[Flow], x: np.ndarray, into: np.ndarray) -> np.ndarray:
    result = into.copy()
    for src, dst, src_row, dst_row, rows in flows:
        result[dst, dst_row : dst_row + rows] = x[src, src_row : src_row + rows]
    return result


def random_flows(rng: random.Random, rows_out: int) -> list[Flow]:
    """Any reads; writes that do not overlap, with gaps."""
    flows = []
    for dst in range(RANKS):
        row = rng.randint(0, 2)
        while row < rows_out and rng.random() < 0.8:
            rows = rng.randint(1, min(3, rows_out - row))
            flows.append(Flow(rng.randrange(RANKS), dst, rng.randint(0, ROWS - rows), row, rows))
            row += rows + rng.randint(0, 2)
    rng.shuffle(flows)
    return flows


@pytest.mark.parametrize("seed", range(8))
def test_random_tables(seed: int) -> None:
    """Result, gradients by x and by `into`, and the forward derivative, against the definition."""
    rng = random.Random(seed)
    rows_out = rng.randint(3, 9)
    flows = random_flows(rng, rows_out)
    x, into, bar = counted(RANKS, ROWS, WIDTH), -counted(RANKS, rows_out, WIDTH), counted(RANKS, rows_out, WIDTH)

    def body(x: jax.Array, into: jax.Array, bar: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, into: hoccl_jax.exchange(x, "x", flows, into=into), x, into)
        zeros, pull_zeros = jax.vjp(lambda x: hoccl_jax.exchange(x, "x", flows, rows=rows_out), x)
        _, tangent = jax.jvp(lambda x: hoccl_jax.exchange(x, "x", flows, rows=rows_out), (x,), (2 * x,))
        return y, pull(bar), zeros, pull_zeros(bar)[0], tangent

    y, (x_bar, into_bar), zeros, x_bar_of_zeros, tangent = on_ranks(body, x, into, bar, check_vma=seed % 2 == 0)
    expected_x_bar, expected_into_bar = np.zeros_like(x), bar.copy()
    for src, dst, src_row, dst_row, rows in flows:
        expected_x_bar[src, src_row : src_row + rows] += bar[dst, dst_row : dst_row + rows]
        expected_into_bar[dst, dst_row : dst_row + rows] = 0
    np.testing.assert_array_equal(y, applied(flows, x, into))
    np.testing.assert_array_equal(zeros, applied(flows, x, 0 * into))
    np.testing.assert_array_equal(tangent, 2 * zeros)
    np.testing.assert_array_equal(x_bar, expected_x_bar)
    np.testing.assert_array_equal(x_bar_of_zeros, expected_x_bar)
    np.testing.assert_array_equal(into_bar, expected_into_bar)


def test_types_batches_and_the_lax_form(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = random_flows(random.Random(1), ROWS)
    for dtype in ("bool", "int4", "bfloat16", "complex64"):
        x = counted(RANKS, ROWS, WIDTH).astype(dtype)
        y = on_ranks(lambda x: hoccl_jax.exchange(x, "x", flows), x)
        np.testing.assert_array_equal(y, applied(flows, x, np.zeros_like(x)))
    x = counted(RANKS, ROWS, 2, WIDTH)
    batched = on_ranks(lambda x: jax.vmap(lambda x: hoccl_jax.exchange(x, "x", flows), in_axes=1, out_axes=1)(x), x)
    np.testing.assert_array_equal(batched, applied(flows, x, 0 * x))
    named = jax.vmap(lambda x: hoccl_jax.exchange(x, "v", flows), axis_name="v")(x)
    np.testing.assert_array_equal(named, applied(flows, x, 0 * x))
    monkeypatch.setenv("HOCCL_DISABLE", "1")
    before = hoccl_jax.stats()["operations"]["exchange"]
    np.testing.assert_array_equal(on_ranks(lambda x: hoccl_jax.exchange(x, "x", flows), x), applied(flows, x, 0 * x))
    assert hoccl_jax.stats()["operations"]["exchange"] == before > 0


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        ((0, 4, 0, 0, 1), r"flow 1, .*dst=4.* names a rank outside 0 to 3"),
        ((-1, 0, 0, 0, 1), "names a rank outside"),
        ((0, 1, 0, 0, 0), "has no rows"),
        ((0, 1, 5, 0, 2), "reads outside the 6 rows of x"),
        ((0, 1, 0, 5, 2), "writes outside the 6 rows of the result"),
        ((2, 0, 0, 1, 1), "write the same rows of rank 0"),
        ((0, 1), "must be"),
        ((0.5, 1, 0, 0, 1), r"flow 1 must be .* in integers, got \(0.5"),
    ],
)
def test_bad_flows(flow: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_ranks(lambda x: hoccl_jax.exchange(x, "x", [Flow(3, 0, 0, 0, 2), flow]), counted(RANKS, ROWS))


def ragged_numbers(rng: random.Random, slices: int, rows_in: int, rows_out: int) -> list[np.ndarray]:
    """Input offsets, send sizes, output offsets and receive sizes of all ranks, [rank, slice]; nothing overlaps anywhere."""
    count = RANKS * slices
    sizes = np.array([[rng.choice([0, 0, 1, 2]) for _ in range(count)] for _ in range(RANKS)])
    arrived = sizes.reshape(RANKS, RANKS, slices).swapaxes(0, 1).reshape(RANKS, count)  # [receiver, sender and slice]

    def offsets(sizes: np.ndarray, rows: int) -> np.ndarray:
        """One behind the other, in random order, from a random start; those of empty slices are anywhere."""
        result = np.array([[rng.choice([-7, 0, 99]) for _ in row] for row in sizes])
        for own, row in zip(result, sizes, strict=True):
            at = rng.randint(0, rows - row.sum())
            for index in rng.sample(np.flatnonzero(row).tolist(), int(np.count_nonzero(row))):
                own[index] = at
                at += row[index]
        return result

    received_at = offsets(arrived, rows_out)
    output_offsets = received_at.reshape(RANKS, RANKS, slices).swapaxes(0, 1).reshape(RANKS, count)
    return [offsets(sizes, rows_in), sizes, output_offsets, arrived]


@pytest.mark.parametrize("slices", [1, 2])
def test_ragged(slices: int) -> None:
    """Result and gradients, of jax.lax's function under the override and of ours, which are one program for all sizes."""
    rows_in, rows_out = 20, 30
    rng = random.Random(slices)
    x, output, bar = counted(RANKS, rows_in, WIDTH), -counted(RANKS, rows_out, WIDTH), counted(RANKS, rows_out, WIDTH)

    def ours(x: jax.Array, output: jax.Array, bar: jax.Array, *numbers: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, output: hoccl_jax.ragged_all_to_all(x, output, *numbers, axis_name="x"), x, output)
        return y, pull(bar), lax.ragged_all_to_all(x, output, *numbers, axis_name="x")

    mesh = Mesh(np.array(jax.devices()[:RANKS]), "x")
    body = jax.shard_map(
        lambda *args: jax.tree.map(lambda y: y[None], ours(*[arg[0] for arg in args])), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    program = jax.jit(body)
    for _ in range(6):
        numbers = ragged_numbers(rng, slices, rows_in, rows_out)
        with hoccl_jax.override_lax():
            y, (x_bar, output_bar), of_lax = jax.tree.map(np.asarray, program(x, output, bar, *[n.astype(np.int32) for n in numbers]))
        inputs, sizes, outputs, _ = numbers
        expected, expected_x_bar, expected_output_bar = output.copy(), np.zeros_like(x), bar.copy()
        for src in range(RANKS):
            for k, (at, size, to) in enumerate(zip(inputs[src], sizes[src], outputs[src], strict=True)):
                if size:
                    expected[k // slices, to : to + size] = x[src, at : at + size]
                    expected_x_bar[src, at : at + size] += bar[k // slices, to : to + size]
                    expected_output_bar[k // slices, to : to + size] = 0
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(of_lax, expected)
        np.testing.assert_array_equal(x_bar, expected_x_bar)
        np.testing.assert_array_equal(output_bar, expected_output_bar)


@pytest.mark.parametrize("priority", ["foreground", "background"])
@pytest.mark.parametrize("sizes", [[[0, 1], [0, 0]], [[0, 1], [1, 0]], [[1, 1], [0, 1]], [[0, 0], [0, 0]]])
def test_long_rows_of_which_some_ranks_get_none(sizes: list[list[int]], priority: Any) -> None:
    """As experts without a token: what is empty has no chunk for a copy thread."""
    width, sent = 140_000, np.array(sizes, np.int32)
    x = counted(2, 2, width)
    numbers = [np.cumsum(sent, 1) - sent, sent, np.cumsum(sent, 0) - sent, sent.T]
    body = jax.shard_map(
        lambda x, output, *numbers: hoccl_jax.ragged_all_to_all(x, output, *numbers, axis_name="x", priority=priority),
        mesh=Mesh(np.array(jax.devices()[:2]), "x"),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    flat = [n.astype(np.int32).reshape(-1) for n in numbers]
    y = jax.jit(body)(x.reshape(4, width), np.zeros((4, width), np.float32), *flat)
    expected = np.zeros((2, 2, width), np.float32)
    for src, dst in zip(*np.nonzero(sent), strict=True):
        expected[dst, numbers[2][src, dst]] = x[src, numbers[0][src, dst]]
    np.testing.assert_array_equal(np.asarray(y), expected.reshape(4, width))


@pytest.mark.parametrize("slices", [1, 3])
def test_own_rows_that_xla_copies_on_gpus(slices: int) -> None:
    rows_in, rows_out = 30, 40
    rng = random.Random(slices)
    x, output = counted(RANKS, rows_in, WIDTH), -counted(RANKS, rows_out, WIDTH)
    program = jax.jit(functools.partial(ragged._with_own_rows, ranks=RANKS))
    for _ in range(4):
        numbers = np.stack(ragged_numbers(rng, slices, rows_in, rows_out), axis=1).astype(np.int32)
        for rank in range(RANKS):
            expected = output[rank].copy()
            for at, size, to, _ in numbers[rank][:, rank * slices : (rank + 1) * slices].T:
                if size:
                    expected[to : to + size] = x[rank, at : at + size]
            np.testing.assert_array_equal(program(x[rank], output[rank], numbers[rank], rank), expected)


def test_ranks_in_groups() -> None:
    """Of which the first rank may have any index."""
    ranks = on_ranks(lambda x: x * 0 + ragged._rank("x", [[2, 0], [1, 3]]), np.zeros(RANKS, np.int32))
    np.testing.assert_array_equal(ranks, [1, 0, 0, 1])


BAD_NUMBERS: dict[str, tuple[int, tuple[int, int], int, str]] = {  # which of the four, where, what, what is said
    "reads outside": (0, (1, 2), 5, "from rank 1 to rank 2: input_offsets 5 with 1 rows is outside 4 rows"),
    "reads before": (0, (1, 2), -1, "input_offsets -1"),
    "writes outside": (2, (3, 0), 4, "from rank 3 to rank 0: output_offsets 4 with 1 rows is outside 4 rows"),
    "disagreement": (3, (2, 0), 2, "rank 0 sends 1 rows, rank 2 expects 2"),
    "negative size": (1, (0, 0), -1, "send_sizes has -1"),
    "overlap": (2, (3, 0), 1, "slices to rank 0 overlap in row 1"),
}


@pytest.mark.parametrize("bad", BAD_NUMBERS.values(), ids=BAD_NUMBERS.keys())
def test_bad_ragged_numbers_are_an_error_on_all_ranks(bad: tuple[int, tuple[int, int], int, str]) -> None:
    """And the next run is sound."""
    which, where, value, message = bad
    at, ones = np.tile(np.arange(RANKS), (RANKS, 1)), np.ones((RANKS, RANKS))
    good = [at, ones, at.T, ones]
    numbers = [number.astype(np.int32) for number in good]
    numbers[which][where] = value
    x = counted(RANKS, RANKS)
    mesh = Mesh(np.array(jax.devices()[:RANKS]), "x")

    def body(*args: jax.Array) -> jax.Array:
        x, *numbers = [arg[0] for arg in args]
        return hoccl_jax.ragged_all_to_all(x, jnp.zeros_like(x), *numbers, axis_name="x")[None]

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    result = program(x, *numbers)
    for shard in result.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            np.asarray(shard.data)
    np.testing.assert_array_equal(program(x, *[number.astype(np.int32) for number in good]), x.T)


def test_ragged_under_vmap_and_in_groups() -> None:
    ones, offsets = np.ones((RANKS, 2), np.int32), np.tile(np.arange(2, dtype=np.int32), (RANKS, 1))
    pairs = [[0, 1], [2, 3]]
    x = counted(RANKS, 2, WIDTH)
    to = np.array([[0, 0], [1, 1], [0, 0], [1, 1]], np.int32)  # first row in the receiver's output: the sender's index in its group

    def body(x: jax.Array, offsets: jax.Array, ones: jax.Array, to: jax.Array) -> jax.Array:
        return hoccl_jax.ragged_all_to_all(x, 0 * x, offsets, ones, to, ones, axis_name="x", axis_index_groups=pairs)

    expected = x.reshape(2, 2, 2, WIDTH).swapaxes(1, 2).reshape(x.shape)
    np.testing.assert_array_equal(on_ranks(body, x, offsets, ones, to), expected)
    size = np.ones((RANKS, RANKS), np.int32)
    at, to = np.tile(np.arange(RANKS, dtype=np.int32), (RANKS, 1)), np.tile(np.arange(RANKS, dtype=np.int32), (RANKS, 1)).T.copy()
    x = counted(RANKS, 2, RANKS, WIDTH)
    batched = on_ranks(
        lambda x, at, size, to: jax.vmap(lambda x: hoccl_jax.ragged_all_to_all(x, 0 * x, at, size, to, size, axis_name="x"))(x),
        *(x, at, size, to),
        check_vma=False,
    )
    np.testing.assert_array_equal(batched, x.transpose(2, 1, 0, 3))
