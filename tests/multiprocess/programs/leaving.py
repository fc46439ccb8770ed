"""One process sends, is done and leaves before the others have made the call: it owes them nothing but the data that it sent."""

from __future__ import annotations

import time

import jax

import hoccl_jax
from tests.multiprocess.programs.common import announce, attempt, await_event, barrier, everyone, ranks_values, report, sharded

_LATE_S = 1.0
_PAIRS = [(0, 1)]


def exchange(x: jax.Array) -> jax.Array:
    """Rank 0 sends to rank 1, rank 2 has no part in it."""
    token = hoccl_jax.psend(x, "x", _PAIRS)
    return hoccl_jax.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "x", _PAIRS)


def main() -> None:
    me = jax.process_index()
    x = ranks_values(everyone(), 2)
    step = sharded(everyone(), exchange).lower(x).compile()
    barrier("compiled")
    if me == 0:
        report(exchange=attempt(step, x))
        announce("leaving")
        hoccl_jax.shutdown()
        announce("left")
    else:
        await_event("leaving" if me == 1 else "left")
        time.sleep(_LATE_S if me == 1 else 0)  # the lateness that is tested: by then process 0 is in shutdown()
        report(exchange=attempt(step, x))


if __name__ == "__main__":
    main()
