"""What works with what: each cell of docs/support.md is the outcome of running it. `python -m tests.support` writes the page anew."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from hoccl_jax import primitives

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "support.md"
RANKS, ROWS, WIDTH = 4, 8, 2
RING = [(rank, (rank + 1) % RANKS) for rank in range(RANKS)]
FLOWS = [(rank, dst, 2 * dst, 2 * rank, 2) for rank in range(RANKS) for dst in range(RANKS)]
Body = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """All are linear. `body` works on one rank's value, `expected` on those of all ranks, [ranks, rows, width]."""

    body: Body
    expected: Callable[[np.ndarray], np.ndarray]
    in_shard_map: bool = True  # else `body` works on the whole array


def _send_recv(x: Any) -> Any:
    return hoccl_jax.precv(hoccl_jax.psend(x, "x", RING), jax.ShapeDtypeStruct(x.shape, x.dtype), "x", RING)


def _send_recv_in_halves(x: Any) -> Any:
    future = hoccl_jax.precv_start(lax.create_token(), jax.ShapeDtypeStruct(x.shape, x.dtype), "x", RING)
    _, y = hoccl_jax.overlap(hoccl_jax.psend_start(x, "x", RING), jnp.negative, x)
    received, z = hoccl_jax.overlap(future, jnp.negative, y)
    return received + z - x


def _ragged(x: Any) -> Any:
    even, to = jnp.arange(RANKS, dtype=jnp.int32) * 2, jnp.full(RANKS, 2 * lax.axis_index("x"), jnp.int32)
    sizes = jnp.full(RANKS, 2, jnp.int32)
    return hoccl_jax.ragged_all_to_all(x, jnp.zeros_like(x), even, sizes, to, sizes, axis_name="x")


def _crossed(x: np.ndarray) -> np.ndarray:
    """Block d of rank r becomes block r of rank d."""
    return x.reshape(RANKS, RANKS, 2, -1).swapaxes(0, 1).reshape(x.shape)


OPERATIONS: dict[str, Operation] = {
    "all_gather": Operation(lambda x: hoccl_jax.all_gather(x, "x", tiled=True), lambda x: np.tile(np.concatenate(list(x)), (RANKS, 1, 1))),
    "all_to_all": Operation(lambda x: hoccl_jax.all_to_all(x, "x", 0, 0, tiled=True), _crossed),
    "ppermute": Operation(lambda x: hoccl_jax.ppermute(x, "x", RING), lambda x: np.roll(x, 1, axis=0)),
    "pshuffle": Operation(lambda x: hoccl_jax.pshuffle(x, "x", [3, 0, 1, 2]), lambda x: np.roll(x, 1, axis=0)),
    "pbroadcast": Operation(lambda x: hoccl_jax.pbroadcast(x, "x", 2), lambda x: np.tile(x[2], (RANKS, 1, 1))),
    "psend, precv": Operation(_send_recv, lambda x: np.roll(x, 1, axis=0)),
    "psend_start, precv_start": Operation(_send_recv_in_halves, lambda x: np.roll(x, 1, axis=0)),
    "exchange": Operation(lambda x: hoccl_jax.exchange(x, "x", FLOWS), _crossed),
    "ragged_all_to_all": Operation(_ragged, _crossed),
    "reshard": Operation(lambda x: hoccl_jax.reshard(x, P(None, "x")), lambda x: x, in_shard_map=False),
}


class Bench:
    """An operation on a mesh whose axis "x" has a type, and with `partly` an automatic axis beside it."""

    def __init__(self, operation: Operation, axis_type: AxisType = AxisType.Auto, partly: bool = False):
        self.operation = operation
        sizes, names, types = ((RANKS, 2), ("x", "y"), (axis_type, AxisType.Auto)) if partly else ((RANKS,), ("x",), (axis_type,))
        self.mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), names, axis_types=types)
        self.manual = {"x"} if partly else set(names)
        self.x = np.arange(RANKS * ROWS * WIDTH, dtype=np.float32).reshape(RANKS, ROWS, WIDTH)

    def over_ranks(self, body: Body) -> Body:
        """`body` as a function of the values of all ranks, [ranks, rows, ...]."""
        if not self.operation.in_shard_map:
            return body

        def strip(x: Any) -> Any:
            return body(x.reshape(x.shape[1:]))[None]

        return jax.shard_map(strip, mesh=self.mesh, in_specs=P("x"), out_specs=P("x"), axis_names=self.manual, check_vma=False)

    def placed(self, x: np.ndarray, spec: P = P("x")) -> jax.Array:  # noqa: B008
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def check(self, result: Any, expected: np.ndarray) -> None:
        np.testing.assert_array_equal(np.asarray(result).reshape(expected.shape), expected)


def _run(bench: Bench, program: Body) -> None:
    bench.check(program(bench.placed(bench.x)), bench.operation.expected(bench.x))


def _jit(bench: Bench) -> None:
    _run(bench, jax.jit(bench.over_ranks(bench.operation.body)))


def _eager(bench: Bench) -> None:
    _run(bench, bench.over_ranks(bench.operation.body))


def _vmap(bench: Bench) -> None:
    batched = np.stack([bench.x, 2 * bench.x, -bench.x], axis=2)  # [ranks, rows, batch, width]
    axis = 1 if bench.operation.in_shard_map else 2
    program = jax.jit(bench.over_ranks(jax.vmap(bench.operation.body, in_axes=axis, out_axes=axis)))
    result = np.asarray(program(bench.placed(batched)))
    for i in range(3):
        bench.check(result[:, :, i], bench.operation.expected(batched[:, :, i]))


def _vmap_over_the_axis(bench: Bench) -> None:
    if not bench.operation.in_shard_map:
        raise NotImplementedError("no axis")
    bench.check(jax.jit(jax.vmap(bench.operation.body, axis_name="x"))(bench.x), bench.operation.expected(bench.x))


def _check_gradient(bench: Bench, body: Body) -> None:
    """<A x, c> = <x, A' c> for the cotangent c."""
    expected = bench.operation.expected(bench.x)
    cotangent = np.arange(expected.size, dtype=np.float32).reshape(expected.shape) % 7

    result_spec = P("x") if bench.operation.in_shard_map else P(None, "x")

    def pull(x: Any, c: Any) -> Any:
        return jax.vjp(bench.over_ranks(body), x)[1](c)[0]

    pulled = np.asarray(jax.jit(pull)(bench.placed(bench.x), bench.placed(cotangent, result_spec)), np.float64)
    assert (pulled * bench.x).sum() == (expected.astype(np.float64) * cotangent).sum()


def _grad(bench: Bench) -> None:
    _check_gradient(bench, bench.operation.body)


def _remat(bench: Bench) -> None:
    _check_gradient(bench, jax.checkpoint(bench.operation.body))


def _jvp(bench: Bench) -> None:
    program = jax.jit(lambda x: jax.jvp(bench.over_ranks(bench.operation.body), (x,), (3 * x,))[1])
    bench.check(program(bench.placed(bench.x)), 3 * bench.operation.expected(bench.x))


def _scan(bench: Bench) -> None:
    def body(x: Any) -> Any:
        operation = bench.operation.body
        return lax.scan(lambda total, factor: (total + operation(factor * x), None), 0 * operation(x), jnp.arange(3.0))[0]

    bench.check(jax.jit(bench.over_ranks(body))(bench.placed(bench.x)), 3 * bench.operation.expected(bench.x))


def _cond(bench: Bench) -> None:
    def body(x: Any) -> Any:
        return lax.cond(jnp.sum(0 * x) == 0, bench.operation.body, lambda x: 0 * bench.operation.body(x), x)

    _run(bench, jax.jit(bench.over_ranks(body)))


def _donation(bench: Bench) -> None:
    _run(bench, jax.jit(bench.over_ranks(bench.operation.body), donate_argnums=0))


def _compiled(bench: Bench) -> Any:
    return jax.jit(bench.over_ranks(bench.operation.body)).lower(bench.placed(bench.x)).compile()


def _ahead_of_time(bench: Bench) -> None:
    _run(bench, _compiled(bench))


def _serialised(bench: Bench) -> None:
    payload, in_tree, out_tree = serialize_executable.serialize(_compiled(bench))
    devices = list(bench.mesh.devices.flat)
    _run(bench, serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices))


def _export(bench: Bench) -> None:
    targets = primitives.TARGET, primitives.START_TARGET, primitives.DONE_TARGET
    safe = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    program = jax.jit(bench.over_ranks(bench.operation.body))
    exported = jax.export.export(program, disabled_checks=safe)(bench.placed(bench.x))
    _run(bench, jax.jit(jax.export.deserialize(exported.serialize()).call))


TRANSFORMS: dict[str, Callable[[Bench], None]] = {
    "jit": _jit,
    "no jit": _eager,
    "vmap": _vmap,
    "vmap over the axis": _vmap_over_the_axis,
    "grad": _grad,
    "jvp": _jvp,
    "remat": _remat,
    "scan": _scan,
    "cond": _cond,
    "donation": _donation,
    "ahead-of-time compilation": _ahead_of_time,
    "serialised executable": _serialised,
    "jax.export": _export,
}
AXES: dict[str, tuple[AxisType, bool]] = {
    "Auto": (AxisType.Auto, False),
    "Explicit": (AxisType.Explicit, False),
    "Auto, beside an automatic axis": (AxisType.Auto, True),
    "Explicit, beside an automatic axis": (AxisType.Explicit, True),
}


def works(check: Callable[[Bench], None], bench: Bench) -> bool:
    """A wrong result is an AssertionError, which nobody expects; all other errors are a "no"."""
    try:
        with jax.set_mesh(bench.mesh):
            check(bench)
    except AssertionError:
        raise
    except Exception:
        return False
    return True


def lowered_for_cuda(operation: Operation) -> str:
    bench = Bench(operation)
    with jax.set_mesh(bench.mesh):
        traced = jax.jit(bench.over_ranks(operation.body)).trace(bench.placed(bench.x))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    ours = primitives.TARGET, primitives.START_TARGET, "CustomSPMDPartitioning"
    return "hoccl_jax" if any(target in text for target in ours) else "XLA"


def row(name: str) -> str:
    """The line of an operation in the page."""
    operation = OPERATIONS[name]
    cells = [works(check, Bench(operation)) for check in TRANSFORMS.values()]
    differentiable = cells[list(TRANSFORMS).index("grad")]
    wanted = [_jit, _grad] if differentiable else [_jit]
    cells += [all(works(check, Bench(operation, *axes)) for check in wanted) for axes in AXES.values()]
    marks = ["yes" if cell else "-" for cell in cells]
    return f"| {name} | {' | '.join(marks)} | {lowered_for_cuda(operation)} |"


HEAD = """# What works with what

Written by `python -m tests.support`, which runs each cell on CPU devices and checks the results; a test keeps the page up to date.

The last four columns before CUDA are types of the mesh axis, with jit and, for operations that have one, the gradient. CUDA: who moves the
data in a program that is lowered for CUDA devices. jax.export needs `DisabledSafetyCheck.custom_call("hoccl_collective")`, and the same for
"hoccl_start" and "hoccl_done" where there are futures; an exported program holds the ids of the devices that it was made for: call it on
these, in this order (in another the results of ranks change places), and call `hoccl_jax.init()` before it where nothing else has started
the engine. `reshard` is a callback from XLA's partitioner, which JAX can't put into a file. `send` and `recv`, between programs, work in
jit, without it, and within scan and cond; they have no vmap and no gradient (tests/unit/test_mpmd.py). The futures of the other operations
go where these go, but not beside an automatic axis (tests/unit/test_futures.py).

A shard_map within a shard_map inherits the mesh, of which JAX then tells no devices: a collective there needs the mesh as the context's
as well, `with jax.set_mesh(mesh):` around the call of the whole program (tests/unit/test_lowering.py).

"""


def page() -> str:
    columns = ["operation", *TRANSFORMS, *AXES, "CUDA"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *map(row, OPERATIONS)]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    PAGE.write_text(page())
