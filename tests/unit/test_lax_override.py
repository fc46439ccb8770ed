"""Unchanged programs on hoccl_jax: what the switch reaches, and that neither side of it leaks into the other."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax

RANKS = 8
RING = [(rank, (rank + 1) % RANKS) for rank in range(RANKS)]
X = np.arange(RANKS * RANKS * 3, dtype=np.float32).reshape(RANKS * RANKS, 3)


def on_ranks(body: Callable[[jax.Array], Any], *, check_vma: bool = True) -> Callable[..., Any]:
    mesh = Mesh(np.array(jax.devices()), "x")
    return jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)


def operations() -> int:
    return sum(hoccl_jax.stats()["operations"].values())


def run(program: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """The result, and how many operations the engine ran for it."""
    before = operations()
    result = jax.block_until_ready(program(*args))
    return jax.tree.map(np.asarray, result), operations() - before


def everything(x: jax.Array) -> Any:
    return [
        lax.all_gather(x, "x", axis=1, tiled=True),
        lax.all_gather(x, "x", axis_index_groups=[[0, 2, 4, 6], [1, 3, 5, 7]]),
        lax.pcast(lax.all_gather(x, "x", to="invarying"), "x", to="varying"),
        lax.pcast(lax.all_gather(x, "x", to="reduced"), "x", to="varying"),
        lax.all_to_all(x, "x", 0, 0, tiled=True),
        lax.all_to_all(x, "x", 0, 1),
        lax.ppermute(x, "x", RING[:-2]),
        lax.pshuffle(x, "x", [3, 2, 1, 0, 7, 6, 5, 4]),
        jax.vmap(lambda row: lax.ppermute(row, "x", RING))(x),
        jax.grad(lambda x: lax.psum((lax.all_to_all(x, "x", 0, 0, tiled=True) ** 2).sum(), "x"))(x),
        lax.scan(lambda carry, _: (lax.ppermute(carry, "x", RING), None), x, length=3)[0],
    ]


def test_an_unchanged_program_runs_on_either_side() -> None:
    """One jitted function, alternating: results agree, and neither its tracing nor its executable crosses over."""
    program = jax.jit(on_ranks(everything))
    outside, none = run(program, X)
    outside_text = program.lower(X).as_text()
    with hoccl_jax.override_lax():
        inside, all_of_them = run(program, X)
        again, same = run(program, X)
        inside_text = program.lower(X).as_text()
        with hoccl_jax.override_lax(enable=False):
            assert run(program, X)[1] == 0
    assert run(program, X)[1] == 0
    assert program.lower(X).as_text() == outside_text
    assert none == 0
    assert all_of_them == same == RANKS * 13  # the scan has three; the gradient's forward half is the same as the first all_to_all
    for theirs, ours, repeated in zip(outside, inside, again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(repeated, theirs)
    assert "hoccl" not in outside_text
    for theirs_only in ("stablehlo.all_gather", "stablehlo.all_to_all", "stablehlo.collective_permute"):
        assert theirs_only in outside_text
        assert theirs_only not in inside_text


def test_without_jit() -> None:
    program = on_ranks(lambda x: lax.all_gather(x, "x", tiled=True))
    assert run(program, X)[1] == 0
    with hoccl_jax.override_lax():
        assert run(program, X)[1] == RANKS
    assert run(program, X)[1] == 0


def test_what_jax_lacks_on_cpu_exists_within() -> None:
    def body(x: jax.Array) -> jax.Array:
        first, second = lax.psend(x, "x", RING), lax.psend(10 * x, "x", RING)
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return lax.precv(first, like, "x", RING) - lax.precv(second, like, "x", RING) + lax.pbroadcast(x, "x", 2)

    sent = np.roll(X.reshape(RANKS, -1), 1, axis=0)
    expected = (sent - 10 * sent + X.reshape(RANKS, -1)[2]).reshape(X.shape)
    program = jax.jit(on_ranks(body, check_vma=False))
    with hoccl_jax.override_lax():
        result, count = run(program, X)
    np.testing.assert_array_equal(result, expected)
    assert count == 5 * RANKS
    with pytest.raises(NotImplementedError, match="psend is currently only implemented on GPU"):
        program(X)
    with pytest.raises(NotImplementedError, match="rule for primitive 'pbroadcast' not found for platform cpu"):
        jax.jit(on_ranks(lambda x: lax.pbroadcast(x, "x", 0)))(X)


def test_other_threads_are_left_alone() -> None:
    program = jax.jit(on_ranks(lambda x: lax.ppermute(x, "x", RING)))
    counts = []
    with hoccl_jax.override_lax():
        thread = threading.Thread(target=lambda: counts.append(run(program, X)[1]))
        thread.start()
        thread.join()
        counts.append(run(program, X)[1])
    assert counts == [0, RANKS]


def test_an_error_leaves_the_context() -> None:
    with pytest.raises(ZeroDivisionError), hoccl_jax.override_lax():
        raise ZeroDivisionError
    assert run(jax.jit(on_ranks(lambda x: lax.ppermute(x, "x", RING))), X)[1] == 0


@pytest.mark.parametrize("enable", [True, False])
def test_a_context_that_could_have_no_effect_is_refused(enable: bool) -> None:
    """A traced function is compiled after the context, if at all: its collectives would silently stay where they were."""
    around_the_body = hoccl_jax.override_lax(enable)(on_ranks(lambda x: lax.ppermute(x, "x", RING)))
    with pytest.raises(RuntimeError, match=r"override_lax\(\) inside a function that JAX traces.*above jax.jit"):
        jax.jit(around_the_body)(X)
    assert run(around_the_body, X)[1] == (RANKS if enable else 0)
    assert run(hoccl_jax.override_lax(enable)(jax.jit(on_ranks(lambda x: lax.ppermute(x, "x", RING)))), X)[1] == (RANKS if enable else 0)


def test_disabling_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCCL_DISABLE", "1")
    with hoccl_jax.override_lax():
        assert run(jax.jit(on_ranks(lambda x: lax.ppermute(x, "x", RING))), X)[1] == 0


def test_what_stays_with_xla_is_counted() -> None:
    mesh = AbstractMesh((RANKS,), ("x",), axis_types=(AxisType.Auto,))
    body = jax.shard_map(lambda x: lax.all_gather(x, "x", tiled=True), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x = jax.device_put(X, jax.NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x")))
    hoccl_jax.reset_stats()
    with hoccl_jax.override_lax():
        result, count = run(jax.jit(body), x)
    np.testing.assert_array_equal(result, np.tile(X, (RANKS, 1)))
    assert count == 0
    assert hoccl_jax.stats()["fallbacks"] == {"all_gather": 1}
    hoccl_jax.reset_stats()
    assert hoccl_jax.stats()["fallbacks"] == {}


def test_lowered_for_cuda() -> None:
    def body(x: jax.Array) -> jax.Array:
        received = lax.precv(lax.psend(x, "x", RING), jax.ShapeDtypeStruct(x.shape, x.dtype), "x", RING)
        return lax.all_to_all(received, "x", 0, 0, tiled=True)

    traced = jax.jit(on_ranks(body, check_vma=False)).trace(X)
    outside = traced.lower(lowering_platforms=("cuda",)).as_text()
    with hoccl_jax.override_lax():
        inside = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "hoccl" not in outside
    assert inside.count("custom_call @hoccl_collective") == 3
    assert "stablehlo.send" in outside
    assert "stablehlo.send" not in inside


def test_the_variable_is_a_context_around_the_process() -> None:
    program = textwrap.dedent(
        """
        import jax, numpy as np, hoccl_jax
        mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
        gather = jax.jit(jax.shard_map(lambda x: jax.lax.all_gather(x, "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")))
        jax.block_until_ready(gather(np.arange(4.0)))
        with hoccl_jax.override_lax(enable=False):
            jax.block_until_ready(gather(np.arange(4.0)))
        print(hoccl_jax.stats()["operations"]["all_gather"])
        """
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOCCL_OVERRIDE_LAX": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert result.stdout == "2\n", result.stderr
