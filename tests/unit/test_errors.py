"""Misuse raises the same type of error as with jax.lax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax

Use = Callable[[Any, jax.Array], Any]

# In a shard_map over axes "a" (2) and "b" (4), on an operand of shape [8, 3] that differs over both axes.
MISUSES: dict[str, Use] = {
    "all_gather over an unknown axis": lambda library, x: library.all_gather(x, "nowhere"),
    "all_gather along a dimension that is not there": lambda library, x: library.all_gather(x, "b", axis=3),
    "all_gather along a negative dimension that is not there": lambda library, x: library.all_gather(x, "b", axis=-3, tiled=True),
    "all_gather of a scalar, tiled": lambda library, x: library.all_gather(x[0, 0], "b", tiled=True),
    "all_gather over a list of axes": lambda library, x: library.all_gather(x, ["a", "b"]),
    "all_gather to an unknown type": lambda library, x: library.all_gather(x, "b", to="nonsense"),
    "all_gather to invarying in groups": lambda library, x: library.all_gather(x, "b", to="invarying", axis_index_groups=[[0, 1], [2, 3]]),
    "all_gather in uneven groups": lambda library, x: library.all_gather(x, "b", axis_index_groups=[[0], [1, 2, 3]]),
    "all_gather in groups out of range": lambda library, x: library.all_gather(x, "b", axis_index_groups=[[0, 1], [2, 4]]),
    "all_gather with positional axis": lambda library, x: library.all_gather(x, "b", 0),
    "all_gather with unknown argument": lambda library, x: library.all_gather(x, "b", dimension=0),
    "all_to_all over an unknown axis": lambda library, x: library.all_to_all(x, "nowhere", 0, 0),
    "all_to_all, untiled, of a dimension that does not fit": lambda library, x: library.all_to_all(x, "b", 0, 0),
    "all_to_all, tiled, of a dimension that does not divide": lambda library, x: library.all_to_all(x, "b", 1, 1, tiled=True),
    "all_to_all along a dimension that is not there": lambda library, x: library.all_to_all(x, "b", 2, 0, tiled=True),
    "all_to_all in uneven groups": lambda library, x: library.all_to_all(x, "b", 0, 0, axis_index_groups=[[0, 1], [2, 3, 1]], tiled=True),
    "ppermute over an unknown axis": lambda library, x: library.ppermute(x, "nowhere", [(0, 1)]),
    "ppermute with a source twice": lambda library, x: library.ppermute(x, "b", [(0, 1), (0, 2)]),
    "ppermute with a destination twice": lambda library, x: library.ppermute(x, "b", [(0, 1), (2, 1)]),
    "ppermute with a rank out of range": lambda library, x: library.ppermute(x, "b", [(0, 4)]),
    "ppermute with no pairs": lambda library, x: library.ppermute(x, "b", 3),
    "ppermute with half a pair": lambda library, x: library.ppermute(x, "b", [(0,)]),
    "ppermute over axes in another order": lambda library, x: library.ppermute(x, ("b", "a"), [(0, 9)]),
    "pshuffle with what is no permutation": lambda library, x: library.pshuffle(x, "b", [0, 0, 1, 2]),
    "pbroadcast over an unknown axis": lambda library, x: library.pbroadcast(x, "nowhere", 0),
    "pbroadcast without source": lambda library, x: library.pbroadcast(x, "b"),
    "pbroadcast of what does not differ": lambda library, x: library.pbroadcast(lax.pmax(x, "b"), "b", 0),
    "psend over an unknown axis": lambda library, x: library.psend(x, "nowhere", [(0, 1)]),
    "gradient of psend": lambda library, x: jax.jvp(lambda x: library.psend(x, "b", [(0, 1)]), (x,), (x,)),
    "precv without shape": lambda library, x: library.precv(library.psend(x, "b", [(0, 1)]), 3, "b", [(0, 1)]),
    "no array": lambda library, x: library.ppermute("text", "b", [(0, 1)]),
}


def error_of(function: Callable[[], Any]) -> Exception:
    try:
        jax.block_until_ready(function())
    except Exception as error:
        return error
    return pytest.fail("nothing was raised")


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())
def test_same_type_as_jax_lax(misuse: Use) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    x = np.ones((64, 3), np.float32)

    def use(library: Any) -> Any:
        body = jax.shard_map(lambda x: misuse(library, x), mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
        return jax.jit(body)(x)

    ours, theirs = error_of(lambda: use(hoccl_jax)), error_of(lambda: use(lax))
    assert type(ours) is type(theirs), (ours, theirs)


OUTSIDE: dict[str, Use] = {
    "all_gather": lambda library, x: library.all_gather(x, "a"),
    "all_to_all": lambda library, x: library.all_to_all(x, "a", 0, 0),
    "ppermute": lambda library, x: library.ppermute(x, "a", [(0, 1)]),
    "pshuffle": lambda library, x: library.pshuffle(x, "a", [1, 0]),
    "pbroadcast": lambda library, x: library.pbroadcast(x, "a", 0),
    "psend": lambda library, x: library.psend(x, "a", [(0, 1)]),
}


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize("use", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_same_type_as_jax_lax_outside_shard_map(use: Use, wrap: Callable[[Any], Any]) -> None:
    x = np.ones((8, 3), np.float32)

    def error(library: Any) -> Exception:
        return error_of(lambda: wrap(lambda x: use(library, x))(x))

    ours, theirs = error(hoccl_jax), error(lax)
    assert type(ours) is type(theirs), (ours, theirs)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "ppermute"])
def test_same_type_as_jax_lax_in_groups_under_a_named_vmap(name: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"all_gather": (), "all_to_all": (0, 0), "ppermute": ([(0, 7)],)}

    def use(library: Any) -> Any:
        keywords = {} if name == "ppermute" else {"axis_index_groups": [[0, 1], [2, 3]]}
        return jax.vmap(lambda x: getattr(library, name)(x, "v", *arguments[name], **keywords), axis_name="v")(np.ones((4, 2)))

    ours, theirs = error_of(lambda: use(hoccl_jax)), error_of(lambda: use(lax))
    if name == "ppermute":  # jax.lax asserts that each index is a source
        assert isinstance(ours, IndexError)
    else:
        assert type(ours) is type(theirs), (ours, theirs)


def test_unknown_priority() -> None:
    with pytest.raises(ValueError, match="priority must be one of foreground, background, got 'urgent'"):
        hoccl_jax.ppermute(np.ones(3), "a", [(0, 1)], priority="urgent")  # type: ignore[arg-type]


def futures(library: Any) -> Any:
    """The start functions under the names of their namesakes, each with its done."""

    class Namesakes:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *args, **keywords: getattr(library, f"{name}_start")(*args, **keywords).done()

    return Namesakes()


# On an axis of `size` ranks; the message has the size in place of N, the size + 1 in place of M.
BadUse = Callable[[Any, Any, Any, int], Any]
BAD_RANKS: dict[str, tuple[BadUse, type[Exception], str]] = {
    "beyond the last": (lambda h, x, axis, size: h.ppermute(x, axis, [(0, size)]), IndexError, "ppermute: perm names rank N of"),
    "far beyond": (lambda h, x, axis, size: h.ppermute(x, axis, [(size + 1, 0)]), IndexError, "perm names rank M of"),
    "before the first": (lambda h, x, axis, size: h.ppermute(x, axis, [(-size - 1, 0)]), IndexError, "perm names rank -M of"),
    "twice": (
        lambda h, x, axis, size: h.ppermute(x, axis, [(0, 0), (0, 0)]),
        ValueError,
        "must be unique, got .* in a group of size N",
    ),
    "bool in perm": (lambda h, x, axis, size: h.ppermute(x, axis, [(False, 0)]), TypeError, "perm must .* integers, got False"),
    "float in perm": (lambda h, x, axis, size: h.ppermute(x, axis, [(0, 0.0)]), TypeError, "perm must .* integers, got 0.0"),
    "half a pair": (lambda h, x, axis, size: h.ppermute(x, axis, [(0,)]), ValueError, "unpack"),
    "source beyond": (lambda h, x, axis, size: h.pbroadcast(x, axis, size), IndexError, "pbroadcast: source names rank N,"),
    "source before": (lambda h, x, axis, size: h.pbroadcast(x, axis, -size - 1), IndexError, "source names rank -M,"),
    "float as source": (lambda h, x, axis, size: h.pbroadcast(x, axis, 0.0), TypeError, "source must .* integers, got 0.0"),
    "bool as source": (lambda h, x, axis, size: h.pbroadcast(x, axis, True), TypeError, "source must .* integers, got True"),
    "psend": (lambda h, x, axis, size: h.psend(x, axis, [(0, size)]), IndexError, "psend: perm names rank N of"),
    "precv": (lambda h, x, axis, size: h.precv(lax.create_token(), x, axis, [(0, size)]), IndexError, "precv: perm names rank N of"),
}


@pytest.mark.parametrize("rows", [4, 0])
@pytest.mark.parametrize("axis", ["x", "o", ()])
@pytest.mark.parametrize("library", [hoccl_jax, futures(hoccl_jax)], ids=["whole", "halves"])
@pytest.mark.parametrize("case", BAD_RANKS)
def test_bad_ranks_in_groups_of_any_size(case: str, library: Any, axis: Any, rows: int) -> None:
    """Also of one rank, and where there is nothing to move."""
    use, kind, message = BAD_RANKS[case]
    size = 8 if axis == "x" else 1
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("x", "o"))

    def body(x: Any) -> Any:
        result = use(library, x, axis, size)
        return x if case == "psend" else result

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    with pytest.raises(kind, match=message.replace("N", str(size)).replace("M", str(size + 1))) as caught:
        program.lower(np.ones((8 * rows,), np.float32))
    if kind is IndexError:
        assert f"the group's size is {size}" in str(caught.value)


VALID_OF_ONE: list[Any] = [[], [(0, 0)], [(0, -1)]]
INVALID_OF_ONE: list[Any] = [[(0, 1)], [(0, 5)], [(3, 0)], [(0, 0)] * 2, [(0, 5), (5, 0)], [(0,)], [(0, 0.5)]]


@pytest.mark.parametrize("perm", VALID_OF_ONE + INVALID_OF_ONE, ids=str)
@pytest.mark.parametrize("axis", ["o", ()])
def test_permutations_of_one_rank_as_jax_lax(perm: Any, axis: Any) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("x", "o"))

    def outcome(library: Any) -> Any:
        body = jax.shard_map(lambda x: library.ppermute(x, axis, perm), mesh=mesh, in_specs=P(("x", "o")), out_specs=P(("x", "o")))
        try:
            return np.asarray(jax.jit(body)(np.arange(8.0))).tolist()
        except Exception as error:
            return type(error)

    assert outcome(hoccl_jax) == outcome(lax)


@pytest.mark.parametrize("size", [1, 4])
def test_bad_ranks_under_a_named_vmap(size: int) -> None:
    x = np.ones((size, 2), np.float32)
    with pytest.raises(IndexError, match=f"perm names rank {size} .*size is {size}"):
        jax.vmap(lambda x: hoccl_jax.ppermute(x, "v", [(0, size)]), axis_name="v")(x)
    with pytest.raises(ValueError, match=f"must be unique, got .* in a group of size {size}"):
        jax.vmap(lambda x: hoccl_jax.ppermute(x, "v", [(0, 0), (-1, 0)] if size > 1 else [(0, 0)] * 2), axis_name="v")(x)
    with pytest.raises(IndexError, match=f"source names rank {size}, .*size is {size}"):
        jax.vmap(lambda x: hoccl_jax.pbroadcast(x, "v", size), axis_name="v")(x)
    with pytest.raises(TypeError, match="source must name ranks by integers, got True"):
        jax.vmap(lambda x: hoccl_jax.pbroadcast(x, "v", True), axis_name="v")(x)
