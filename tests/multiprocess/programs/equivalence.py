"""Random cases against jax.lax on all devices of a job: `equivalence.py SEED COUNT`. Ranks report how many they ran and which differed."""

from __future__ import annotations

import sys
import traceback

import jax

from tests import cases
from tests.multiprocess.programs.common import barrier, report


def main(seed: int, count: int) -> None:
    failed: dict[str, str] = {}
    ran = 0
    for case in cases.generate(jax.device_count(), seed, count):
        try:
            cases.check(case, jax.devices())
        except Exception:  # the other ranks go on to the next case too: every program is the same on all
            failed[str(case)] = traceback.format_exc()[-2000:]
        ran += 1
    report(ran=ran, failed=failed)
    barrier("done")  # a send is done before it is received: who leaves at once takes the data along (test_leaving.py)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
