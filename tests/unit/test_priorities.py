"""Background transfers give way to foreground traffic between chunks, and are seen to do so in the statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax

_CHUNK_BYTES = 64 << 10
_CHUNKS = 2 * 2 * 8  # flows x chunks of each


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine anew, with chunks that there are several of."""
    monkeypatch.setenv("HOCCL_CHUNK_BYTES", str(_CHUNK_BYTES))
    monkeypatch.setenv("HOCCL_BACKGROUND_PATIENCE_MS", "1")
    hoccl_jax.shutdown()
    hoccl_jax.init()
    yield
    hoccl_jax.shutdown()


def gather(priority: Any) -> None:
    """Two ranks gather 8 chunks each."""
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    body = jax.shard_map(lambda x: hoccl_jax.all_gather(x, "x", priority=priority), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x = np.arange(2 * 8 * _CHUNK_BYTES // 4, dtype=np.int32)
    np.testing.assert_array_equal(np.asarray(jax.jit(body)(x))[:2].ravel(), x)


def background() -> dict[str, int]:
    return hoccl_jax.stats()["background"]


def test_background_chunks_are_counted() -> None:
    gather("foreground")
    assert background() == {"chunks": 0, "held": 0, "forced": 0}
    gather("background")
    assert background() == {"chunks": _CHUNKS, "held": 0, "forced": 0}
    hoccl_jax.reset_stats()
    assert background() == {"chunks": 0, "held": 0, "forced": 0}


def test_in_a_foreground_region_they_move_one_by_one() -> None:
    """A program that needs a background transfer ends even so."""
    with hoccl_jax.foreground(), hoccl_jax.foreground():
        gather("foreground")
        gather("background")
        counts = background()
    assert (counts["chunks"], counts["forced"]) == (_CHUNKS, _CHUNKS)
    assert counts["held"] >= 1
    gather("background")
    assert background() == counts | {"chunks": 2 * _CHUNKS}


def test_a_region_survives_its_engine() -> None:
    with hoccl_jax.foreground():
        hoccl_jax.shutdown()
        hoccl_jax.init()
    gather("background")
    assert background()["forced"] == 0


def test_a_region_is_none_of_a_program() -> None:
    def traced(x: jax.Array) -> jax.Array:
        with hoccl_jax.foreground():
            return x + 1

    with pytest.raises(RuntimeError, match="inside a function that JAX traces"):
        jax.jit(traced)(1.0)
