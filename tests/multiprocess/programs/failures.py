"""Jobs in which something goes wrong: `failures.py SCENARIO [ARGUMENT]`. Each rank reports what it saw."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import hoccl_jax
from tests.multiprocess.programs.common import (
    announce,
    attempt,
    await_event,
    barrier,
    everyone,
    leave,
    mesh_of,
    ranks_values,
    report,
    sharded,
)

ME = jax.process_index()


def gather(x: jax.Array) -> jax.Array:
    return hoccl_jax.all_gather(x, "x", tiled=True)


def attempt_together(step: Any, x: jax.Array) -> dict[str, Any]:
    """Compiles, waits until all processes have done so, and runs: ranks then come within milliseconds, however loaded the machine is."""
    compiled = step.lower(x).compile()
    barrier("compiled")
    return attempt(compiled, x)


def run_next_program() -> None:
    """After a failure, a program that all ranks agree on."""
    step = sharded(everyone(), lambda x: gather(x + 1), name="next_program")
    report(next=attempt_together(step, ranks_values(everyone(), 1)))


def killed(victim: int) -> None:
    """`victim` dies by SIGKILL between two of 100 dependent gathers of one program, while the others wait in the next one."""

    def die_at_ten(i: np.ndarray, x: np.ndarray) -> np.ndarray:
        if victim == ME and i == 10:
            report(died_at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def body(i: int, x: jax.Array) -> jax.Array:
        x = jax.pure_callback(die_at_ten, jax.ShapeDtypeStruct(x.shape, x.dtype), i, x)
        return gather(x)[: x.size] + 1

    doomed = sharded(everyone(), lambda x: jax.lax.fori_loop(0, 100, body, x), check_vma=False)
    x = ranks_values(everyone(), 1 << 18)
    report(doomed=attempt(lambda x: doomed(x)[:1], x))
    # A program that needs the lost process says so; one of the survivors alone runs.
    report(again=attempt(sharded(everyone(), gather, name="again"), ranks_values(everyone(), 1)))
    survivors = mesh_of([p for p in range(jax.process_count()) if p != victim])
    report(next=attempt(sharded(survivors, gather, name="next_program"), ranks_values(survivors, 1)))
    leave()  # no barrier: nothing must keep a survivor alive


def disagree() -> None:
    """The process with an odd index brings something else to a call that both make, in one way after the other."""
    mesh, odd = everyone(), ME % 2 == 1
    n = mesh.devices.size
    whole, pairs = [list(range(n))], [[i, i + n // 2] for i in range(n // 2)]

    def exchange(x: jax.Array) -> jax.Array:
        return hoccl_jax.all_to_all(x, "x", 0, 0, tiled=True)

    def gather_in(groups: list[list[int]]) -> Callable[[jax.Array], jax.Array]:
        return lambda x: hoccl_jax.all_gather(x, "x", axis_index_groups=groups, tiled=True)

    def shift_by(distance: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: hoccl_jax.ppermute(x, "x", [(i, (i + distance) % n) for i in range(n)])

    x = ranks_values(mesh, n)
    choices: dict[str, tuple[Callable[[jax.Array], Any], jax.Array]] = {
        "shape": (gather, ranks_values(mesh, 2 * n) if odd else x),
        "dtype": (gather, ranks_values(mesh, n, np.int32) if odd else x),
        "kind": (exchange if odd else gather, x),
        "groups": (gather_in(pairs if odd else whole), x),
        "permutation": (shift_by(1 if odd else n - 1), x),
    }
    for what, (function, operand) in choices.items():
        report(**{what: attempt_together(sharded(mesh, function, name=f"step_{what}"), operand)})
    run_next_program()


def other_program() -> None:
    """The two processes run different programs: neither comes to the other's call."""
    step = sharded(everyone(), gather, name="left" if ME == 0 else "right")
    report(missed=attempt_together(step, ranks_values(everyone(), 1)))
    run_next_program()


def never_comes() -> None:
    """Process 1 doesn't run the program."""
    if ME != 1:
        report(missed=attempt(sharded(everyone(), gather), ranks_values(everyone(), 1)))
    run_next_program()


def late(delay_s: float) -> None:
    """Process 1 comes `delay_s` after the others have come; the delay is what is tested."""
    step = sharded(everyone(), gather)
    x = ranks_values(everyone(), 1)
    step = step.lower(x).compile()
    barrier("ready")
    if ME == 1:
        time.sleep(delay_s)
    report(late=attempt(step, x))
    run_next_program()


def too_late() -> None:
    """Process 1 comes when the others have given up."""
    step = sharded(everyone(), gather)
    x = ranks_values(everyone(), 1)
    if ME == 1:
        await_event("given up")
    report(late=attempt(step, x))
    if ME == 0:
        announce("given up")
    run_next_program()


def main(scenario: str, *args: str) -> None:
    hoccl_jax.init()
    if scenario == "killed":
        killed(victim=int(args[0]))
    elif scenario == "late":
        late(delay_s=float(args[0]))
    else:
        {"disagree": disagree, "other_program": other_program, "never_comes": never_comes, "too_late": too_late}[scenario]()


if __name__ == "__main__":
    main(*sys.argv[1:])
