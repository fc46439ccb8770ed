"""The mixture of experts: dispatch and combine by ragged_all_to_all against a dense model."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax
from examples import mixture_of_experts as moe


@pytest.mark.parametrize(("devices", "experts", "tokens"), [(2, 1, 5), (8, 2, 16)])
@pytest.mark.parametrize("skew", [0.0, 50.0], ids=["even", "all to the same experts"])
def test_values_and_gradients_are_those_of_the_dense_model(devices: int, experts: int, tokens: int, skew: float) -> None:
    mesh = Mesh(np.array(jax.devices()[:devices]), moe.AXIS)
    params = moe.initial(8, devices * experts, seed=1)
    params = params._replace(router=params.router.at[:, :2].mul(1 + skew))
    x, wanted = moe.batch(devices * tokens, 8, 0)
    sharded = jax.shard_map(moe.mixture, mesh=mesh, in_specs=(moe.SPECS, P(moe.AXIS)), out_specs=P(moe.AXIS))

    def loss(model: object, params: moe.Params, x: jax.Array) -> jax.Array:
        return jnp.mean((model(params, x) - wanted) ** 2)  # type: ignore[operator]

    before = hoccl_jax.stats()["operations"]["ragged_all_to_all"]
    ours = jax.jit(jax.value_and_grad(lambda *args: loss(sharded, *args), argnums=(0, 1)))(params, x)
    reference = jax.jit(jax.value_and_grad(lambda *args: loss(moe.dense, *args), argnums=(0, 1)))(params, x)
    assert hoccl_jax.stats()["operations"]["ragged_all_to_all"] == before + 4 * devices  # forward and backward
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.any_jax
def test_the_script_trains() -> None:
    parent = str(pathlib.Path(hoccl_jax.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([parent, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, moe.__file__, "--steps=30", "--tokens=16", "--width=16"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last, _ = (float(number) for number in done.stdout.split("| mixture |")[1].split("\n")[0].strip(" |").split("|"))
    assert last < 0.9 * first
