"""What a collective becomes: the custom call, its attributes, its identity, and where there is none."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import config
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax


def calls(lowered: jax.stages.Lowered) -> list[dict[str, Any]]:
    """The attributes of the custom calls of a lowered program, in its order."""
    found = []
    for text in re.findall(r"custom_call @hoccl_collective.*mhlo\.backend_config = \{(.*?)\}", lowered.as_text()):
        call: dict[str, Any] = {}
        for name, string, integer, dense in re.findall(r'(\w+) = (?:"(.*?)"|(-?\d+) : i64|dense<(.*?)> : tensor<\d+xi64>)', text):
            call[name] = string or (int(integer) if integer else [int(number) for number in re.findall(r"-?\d+", dense)])
        found.append(call)
    return found


def lowered(function: Callable[..., Any], mesh: Any, *shapes: tuple[int, ...], dtype: Any = np.float32) -> jax.stages.Lowered:
    body = jax.shard_map(function, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names), check_vma=False)
    return jax.jit(body).lower(*(jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), dtype) for shape in shapes))


def mesh_of(*sizes: int, names: str = "ab") -> Mesh:
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple(names[: len(sizes)]))


def abstract_program(library: Any) -> Any:
    """Gathers over an abstract mesh of two devices."""
    mesh = AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(lambda x: library.all_gather(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P("a")))


def test_attributes_of_all_gather() -> None:
    def step(x: jax.Array) -> jax.Array:
        return hoccl_jax.all_gather(x, "b", axis=1, priority="background")

    (call,) = calls(lowered(step, mesh_of(2, 3), (4, 5), dtype=jnp.bfloat16))
    site = call.pop("site")
    assert site > 0
    assert call == {
        "kind": "all_gather",
        "module": "jit_step",
        "groups": [0, 1, 2, 3, 4, 5],
        "group_size": 3,
        "dtype": "bfloat16",
        "itemsize": 2,
        "shape": [4, 1, 5],
        "split_axis": -1,
        "concat_axis": 1,
        "pairs": [],
        "priority": 1,
        "beside": 1,
    }


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lambda x: hoccl_jax.all_to_all(x, "a", 1, 0, tiled=True),
            {"kind": "all_to_all", "shape": [4, 6], "split_axis": 1, "concat_axis": 0, "groups": [0, 3, 1, 4, 2, 5]},
        ),
        # Untiled: the new dimension has size 1 before.
        (lambda x: hoccl_jax.all_to_all(x[:2], "a", 0, 1), {"shape": [2, 6, 1], "split_axis": 0, "concat_axis": 2}),
        (lambda x: hoccl_jax.ppermute(x, "b", [(0, 2), (2, 1)]), {"kind": "ppermute", "pairs": [0, 2, 2, 1], "concat_axis": -1}),
        (lambda x: hoccl_jax.pbroadcast(x, "b", -1), {"kind": "pbroadcast", "pairs": [2, 0, 2, 1, 2, 2]}),
        (lambda x: hoccl_jax.all_gather(x, ("b", "a")), {"groups": [0, 3, 1, 4, 2, 5], "group_size": 6}),
        (
            lambda x: hoccl_jax.all_gather(x, ("a", "b"), axis_index_groups=[[5, 0], [1, 4], [2, 3]]),
            {"groups": [5, 0, 1, 4, 2, 3], "group_size": 2},
        ),
    ],
)
def test_geometry_and_groups(function: Callable[[jax.Array], jax.Array], expected: dict[str, Any]) -> None:
    (call,) = calls(lowered(function, mesh_of(2, 3), (4, 6)))
    assert {name: call[name] for name in expected} == expected


def test_groups_name_devices_in_the_order_of_the_mesh() -> None:
    order = [6, 1, 4, 3]
    mesh = Mesh(np.array(jax.devices())[order], "a")
    (call,) = calls(lowered(lambda x: hoccl_jax.all_gather(x, "a"), mesh, (1,)))
    assert call["groups"] == order


@pytest.mark.parametrize(("dtype", "itemsize"), [("int4", 1), ("uint2", 1), ("float4_e2m1fn", 1), ("bool", 1), ("complex128", 16)])
def test_types_keep_their_name_and_narrow_ones_travel_as_bytes(dtype: str, itemsize: int) -> None:
    with jax.enable_x64(True):
        (call,) = calls(lowered(lambda x: hoccl_jax.ppermute(x, "a", [(0, 1)]), mesh_of(2), (3,), dtype=jnp.dtype(dtype)))
    assert (call["dtype"], call["itemsize"], call["shape"]) == (dtype, itemsize, [3])


def test_keys_travel_as_their_data() -> None:
    key = jax.random.key(0).dtype
    (call,) = calls(lowered(lambda x: hoccl_jax.all_gather(x, "a"), mesh_of(2), (3,), dtype=key))
    assert (call["dtype"], call["itemsize"], call["shape"], call["concat_axis"]) == ("key<fry>", 4, [1, 3, 2], 0)


def test_equal_collectives_are_two_call_sites() -> None:
    first, second = calls(lowered(lambda x: hoccl_jax.all_gather(x, "a") + hoccl_jax.all_gather(x, "a"), mesh_of(2), (3,)))
    assert first.pop("site") != second.pop("site")
    assert first == second


def test_matching_sends_and_receives_have_one_number() -> None:
    """Counted for each (axes, pairs, shape, type), in the order of tracing; never the number of a collective."""

    def step(x: jax.Array, y: jax.Array) -> Any:
        ring, back = [(0, 1), (1, 0)], [(1, 0)]
        tokens = [
            hoccl_jax.psend(x, "a", ring),
            hoccl_jax.psend(y, "a", ring),
            hoccl_jax.psend(x, "a", ring),
            hoccl_jax.psend(x, "a", back),
        ]
        z = hoccl_jax.all_gather(x, "a")
        like_x, like_y = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, y))
        return z, [
            hoccl_jax.precv(tokens[3], like_x, "a", back),
            hoccl_jax.precv(tokens[0], like_x, "a", ring),
            hoccl_jax.precv(tokens[2], like_x, "a", ring),
            hoccl_jax.precv(tokens[1], like_y, "a", ring),
        ]

    found = calls(lowered(step, mesh_of(2), (3,), (5,)))
    sends = [call["site"] for call in found if call["kind"] == "send"]
    receives = [call["site"] for call in found if call["kind"] == "recv"]
    assert receives == [sends[3], sends[0], sends[2], sends[1]]
    assert len(set(sends)) == 4
    assert max(sends) < 0 < min(call["site"] for call in found if call["kind"] == "all_gather")


def test_a_receive_of_other_data_than_its_token_sends_is_refused() -> None:
    """Nothing would ever come. A token of other data is an order, and no error, where the expected data was sent too."""

    def step(x: jax.Array, *, sent_too: bool = False, back: bool = False) -> jax.Array:
        if sent_too:
            hoccl_jax.psend(x, "a", [(0, 1)])
        token = hoccl_jax.psend(jnp.concatenate([x, x]), "a", [(0, 1)])
        return hoccl_jax.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "a", [(1, 0) if back else (0, 1)])

    with pytest.raises(ValueError, match=r"precv: out_shape is float32\[3\], but the psend of its token sends float32\[6\] \(ranks 0->1\)"):
        lowered(step, mesh_of(2), (3,))
    lowered(lambda x: step(x, sent_too=True), mesh_of(2), (3,))
    lowered(lambda x: step(x, back=True), mesh_of(2), (3,))


@pytest.mark.skipif(not hasattr(jax.config, "jax_use_rgv3"), reason="since jax 0.11")
def test_the_mesh_axes_are_named_where_jax_names_them() -> None:
    def step(x: jax.Array) -> jax.Array:
        return hoccl_jax.all_gather(hoccl_jax.all_to_all(x, ("b", "a"), 0, 1), "b")

    mesh = mesh_of(2, 3)
    with config.use_rgv3(False):
        assert "axis_ref" not in lowered(step, mesh, (6, 5)).as_text()
    with config.use_rgv3(True):
        text = lowered(step, mesh, (6, 5)).as_text()
    named = re.findall(r"custom_call @hoccl.* replica_groups = #stablehlo.replica_group_mesh_axes<mesh = (.*?), axes = \[(.*?)\]>", text)
    assert [re.findall(r'"(\w)"', axes) for _, axes in named] == [["b", "a"], ["b"]]
    assert [mesh for mesh, _ in named] == ['#sdy.mesh<["a"=2, "b"=3]>'] * 2


@pytest.mark.parametrize("name", ["psend", "precv", "ppermute"])
def test_errors_name_the_function(name: str) -> None:
    def step(x: jax.Array) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        right, wrong = [(0, 1)], [(0, 1), (0, 0)]
        if name == "ppermute":
            return hoccl_jax.ppermute(x, "a", wrong)
        token = hoccl_jax.psend(x, "a", wrong if name == "psend" else right)
        return hoccl_jax.precv(token, like, "a", wrong if name == "precv" else right)

    with pytest.raises(ValueError, match=f"^{name} sources and destinations must be unique"):
        lowered(step, mesh_of(2), (3,))


def test_a_new_module_counts_anew() -> None:
    def step(x: jax.Array) -> jax.Array:
        token = hoccl_jax.psend(x, "a", [(0, 1)])
        return hoccl_jax.all_gather(hoccl_jax.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "a", [(0, 1)]), "a")

    first = calls(lowered(step, mesh_of(2), (3,)))
    jax.clear_caches()
    assert calls(lowered(step, mesh_of(2), (3,))) == first


@pytest.mark.parametrize(
    "function",
    [
        lambda x: hoccl_jax.all_gather(x, "b", tiled=True),
        lambda x: hoccl_jax.all_gather(x, "b"),
        lambda x: hoccl_jax.all_to_all(x, "b", 0, 0, tiled=True),
        lambda x: hoccl_jax.ppermute(x, "b", [(0, 0)]),
        lambda x: hoccl_jax.pbroadcast(x, "b", 0),
        lambda x: hoccl_jax.ppermute(x, "a", []),
        lambda x: hoccl_jax.all_gather(x[:, :0], "a"),
    ],
)
def test_nothing_to_move_is_no_call(function: Callable[[jax.Array], jax.Array]) -> None:
    """Groups of one rank, empty permutations, arrays without elements."""
    assert calls(lowered(function, mesh_of(2, 1), (4, 3))) == []


def test_disabled_is_jax_lax(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(library: Any) -> str:
        def step(x: jax.Array) -> Any:
            return [
                library.all_gather(x, "a", axis=1, tiled=True),
                library.all_to_all(x, "a", 0, 0, tiled=True),
                library.ppermute(x, "a", [(0, 1)]),
                library.pshuffle(x, "a", [1, 0]),
            ]

        return lowered(step, mesh_of(2), (4, 3)).as_text()

    assert "hoccl" in program(hoccl_jax)
    monkeypatch.setenv("HOCCL_DISABLE", "1")
    assert program(hoccl_jax) == program(lax)


def test_disabled_pbroadcast_and_psend_are_as_limited_as_jax_lax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCCL_DISABLE", "1")
    with pytest.raises(NotImplementedError, match="pbroadcast"):
        lowered(lambda x: hoccl_jax.pbroadcast(x, "a", 0), mesh_of(2), (4,))
    with pytest.raises(NotImplementedError, match="psend"):
        lowered(lambda x: (hoccl_jax.psend(x, "a", [(0, 1)]), x)[1], mesh_of(2), (4,))


def test_a_platform_without_the_engine_gets_jax_lax() -> None:
    def text(library: Any) -> str:
        return abstract_program(library).trace(jax.ShapeDtypeStruct((4,), np.float32)).lower(lowering_platforms=("tpu",)).as_text()

    assert "stablehlo.all_gather" in text(hoccl_jax)
    assert "hoccl" not in text(hoccl_jax)


def test_an_abstract_mesh_lowers_but_compiles_only_where_the_devices_are_known() -> None:
    """jax doesn't tell a lowering rule which devices stand for the abstract mesh: no guess, an error that says what to do."""
    mesh = mesh_of(2)
    x = jax.device_put(np.arange(4.0), jax.NamedSharding(mesh, P("a")))
    program = abstract_program(hoccl_jax).lower(x)
    (call,) = calls(program)
    assert (call["groups"], call["group_size"]) == ([], 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"abstract mesh.*jax\.set_mesh"):
        program.compile()
    with jax.set_mesh(mesh):
        body = jax.shard_map(lambda x: hoccl_jax.all_gather(x, "a"), in_specs=P("a"), out_specs=P("a"))
        np.testing.assert_array_equal(jax.jit(body)(x), [[0, 1], [2, 3]] * 2)


def test_a_nested_shard_map_needs_the_mesh_as_context() -> None:
    """Of the mesh that it inherits JAX tells the axes only, and it accepts no other: the error says what helps, when it is lowered."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    ring = [(rank, (rank + 1) % 4) for rank in range(4)]

    def outer(x: Any) -> Any:
        inner = jax.shard_map(lambda x: hoccl_jax.ppermute(x, "b", ring), in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
        return inner(x)

    program = jax.jit(jax.shard_map(outer, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}))
    x = np.arange(8.0)
    with pytest.raises(ValueError, match=r"inherits.*with jax\.set_mesh\(mesh\)"):
        program.lower(x)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(program(x), [3, 0, 1, 2, 7, 4, 5, 6])


def test_symbolic_shapes_are_refused() -> None:
    (size,) = jax.export.symbolic_shape("size")
    body = jax.shard_map(lambda x: hoccl_jax.all_gather(x, "a"), mesh=mesh_of(2), in_specs=P(None, "a"), out_specs=P(None, "a"))
    with pytest.raises(NotImplementedError, match="symbolic shapes"):
        jax.export.export(jax.jit(body))(jax.ShapeDtypeStruct((size, 4), np.float32))


def test_lowering_for_described_devices_starts_nothing(tmp_path: pathlib.Path) -> None:
    """Import, tracing and lowering without live devices leave the engine alone, in a process that never used it."""
    program = textwrap.dedent(
        """
        import jax, numpy as np, hoccl_jax
        from hoccl_jax import _native
        mesh = jax.sharding.AbstractMesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        body = jax.shard_map(lambda x: hoccl_jax.all_gather(x, "a"), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
        text = jax.jit(body).trace(jax.ShapeDtypeStruct((4,), np.float32)).lower(lowering_platforms=("cpu",)).as_text()
        assert "hoccl_collective" in text
        try:
            _native.stats()
        except RuntimeError as error:
            print(error)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "does not run in this process" in result.stdout
