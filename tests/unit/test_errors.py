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
