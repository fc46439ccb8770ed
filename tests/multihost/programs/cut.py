"""Collectives over and over, until one fails or SIGUSR1 comes: says how many there were, and what the failure was."""

from __future__ import annotations

import signal
import time
from typing import Any

import jax
import numpy as np

import hoccl_jax
from tests.multiprocess.programs.common import barrier, everyone, leave, local, ranks_values, report, sharded

_ROUNDS_AFTER_A_CUT = 50
_VALUES = 1 << 15  # a rank
_PAUSE_S = 0.05  # between rounds: the rounds must still go on while the test cuts the link, and need not fill the machine


def main() -> None:
    ending = False

    def end(*_: Any) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGUSR1, end)
    mesh = everyone()
    n = mesh.devices.size
    x = ranks_values(mesh, _VALUES)
    step = sharded(
        mesh, lambda x: (hoccl_jax.all_gather(x, "x", tiled=True)[: x.size], hoccl_jax.ppermute(x, "x", [(0, n - 1), (n - 1, 0)]))
    )
    jax.block_until_ready(step(x))
    # All ranks end after the same round: whoever is asked to end says so to the others.
    stop = sharded(mesh, lambda x: jax.numpy.max(hoccl_jax.all_gather(x, "x", tiled=True), keepdims=True))
    report(running=jax.process_index())
    rounds = 0
    while True:
        start = time.monotonic()
        try:
            gathered, permuted = step(x)
            # Every byte: each device has the values of all, cut to as many as it brought, and its partner's.
            for shard in gathered.addressable_shards:
                assert np.array_equal(np.asarray(shard.data), np.arange(_VALUES, dtype=np.float32))
            for shard in permuted.addressable_shards:
                source = n - 1 - shard.index[0].start // _VALUES
                wanted = np.arange(_VALUES, dtype=np.float32) + source * _VALUES if source in (0, n - 1) else np.zeros(_VALUES)
                assert np.array_equal(np.asarray(shard.data), wanted)
            wanted = jax.make_array_from_callback((n,), x.sharding, lambda index: np.full(n, float(ending), np.float32)[index])
            ended = local(stop(wanted))[0] == [1.0]
        except jax.errors.JaxRuntimeError as error:
            report(lost={"error": str(error), "seconds": time.monotonic() - start, "rounds": rounds})
            leave()
        rounds += 1
        if ended:
            report(ended=rounds)
            barrier("ended")
            return
        if rounds == _ROUNDS_AFTER_A_CUT:
            report(state="still running")
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
