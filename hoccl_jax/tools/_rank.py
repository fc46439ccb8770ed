"""What a process of `hoccl_jax.tools.launch` runs: it ties its life to the launcher's, joins the job, then runs the user's program."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence


def end_with_launcher(lifeline: int) -> None:
    """Kills this rank and everything that it started when the launcher is gone, however it went (SIGKILL included).

    `lifeline` is the read end of a pipe whose only write end the launcher holds: it reads end-of-file once the launcher is dead or lets
    go. Unlike PR_SET_PDEATHSIG this doesn't depend on which thread of the launcher started the rank.
    """

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        os.killpg(0, signal.SIGKILL)  # the launcher made this process the leader of its own group

    threading.Thread(target=watch, name="hoccl-launch-lifeline", daemon=True).start()


def run_program(program: Sequence[str]) -> None:
    """Runs `[script.py, args...]` or `[-m, module, args...]` as the interpreter itself would."""
    if program[0] == "-m":
        sys.argv = list(program[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(program)
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="hoccl_jax.tools._rank")
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--coordinator")
    parser.add_argument("--world", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--heartbeat-timeout-s", type=int, default=100)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    end_with_launcher(options.lifeline)
    if options.coordinator:
        import jax  # a program that joins by itself may set JAX's environment before it imports JAX

        jax.distributed.initialize(options.coordinator, options.world, options.rank, heartbeat_timeout_seconds=options.heartbeat_timeout_s)
    run_program(options.program[1:] if options.program[0] == "--" else options.program)


if __name__ == "__main__":
    main(sys.argv[1:])
