"""Runs one program as several processes of one jax.distributed job on this host (or as this host's share of a job over several hosts).

    python -m hoccl_jax.tools.launch -n 2 --devices 4 train.py --steps 10
    python -m hoccl_jax.tools.launch -n 2 --devices 4 -m pytest tests

The program needs no change: each process has called `jax.distributed.initialize` before the program's first line, so
`jax.process_index()` and a mesh over `jax.devices()` just work. Output lines come with the rank in front. When a rank fails, the others
get a few seconds to say what they saw and are then killed; the exit code is that of the first rank that failed. No process outlives the
launcher, however the launcher ends.

Two hosts, each with its share of a job of four:

    host0$ python -m hoccl_jax.tools.launch -n 2 --world 4 --coordinator host0:1234 train.py
    host1$ python -m hoccl_jax.tools.launch -n 2 --world 4 --coordinator host0:1234 --first_rank 2 train.py

From Python (tests, benchmarks) `run` does the same and returns what each rank printed; `Ranks` gives control over single ranks while
they run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import BinaryIO, Self

from absl import flags

# Enough to diagnose a rank; a job that prints for days must not fill the launcher's memory.
_KEPT_OUTPUT_BYTES = 4 << 20

# A descendant of a rank in a session of its own escapes the rank's kill and may hold the output pipe open: nobody waits longer for it.
_STRAGGLER_S = 5.0

Sink = Callable[[int, bytes], None]
"""Gets (rank, bytes) of output as it comes, called from a thread of that rank."""


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago. It isn't reserved: start its user at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prefixed(stream: BinaryIO) -> Sink:
    """A sink that writes whole lines to `stream`, each with its rank in front."""
    lock = threading.Lock()
    partial: dict[int, bytes] = {}

    def write(rank: int, chunk: bytes) -> None:
        *lines, rest = (partial.get(rank, b"") + chunk).split(b"\n")
        with lock:
            partial[rank] = rest
            stream.writelines(b"[%d] %s\n" % (rank, line) for line in lines)
            stream.flush()

    return write


def only(rank: int, stream: BinaryIO) -> Sink:
    """A sink that passes the bytes of one rank on unchanged, so that its progress bars work."""

    def write(source: int, chunk: bytes) -> None:
        if source == rank:
            stream.write(chunk)
            stream.flush()

    return write


@dataclasses.dataclass(frozen=True)
class Result:
    """How a rank ended. `returncode`: -signal when a signal ended it, None while it runs. `output`: stdout and stderr, the last 4 MiB."""

    rank: int
    returncode: int | None
    output: str


class LaunchError(RuntimeError):
    """A rank failed, or the job missed its deadline. `results` holds the results of the ranks in question, in rank order."""

    def __init__(self, reason: str, results: Sequence[Result]):
        self.results = list(results)
        tails = [f"--- rank {r.rank}, exit code {r.returncode}:\n{r.output[-4000:].rstrip()}" for r in self.results]
        super().__init__("\n".join([reason, *tails]))


class _Process:
    """One rank: its process, the thread that collects its output and the thread that waits for its end."""

    def __init__(self, rank: int, argv: Sequence[str], env: Mapping[str, str], lifeline: int, sink: Sink | None, ended: queue.Queue[int]):
        self._rank = rank
        self._sink = sink
        self._ended = ended
        self._output = bytearray()
        self._complete = False  # no output will follow
        self._changed = threading.Condition()  # guards _output and _complete
        self._reaping = threading.Lock()  # held while the pid may stop being ours
        # Its own session: one signal reaches all that the rank started, and Ctrl-C in a terminal reaches the launcher alone, which then
        # ends the ranks.
        self._popen = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lifeline,),
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, name=f"hoccl-launch-output-{rank}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"hoccl-launch-wait-{rank}", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                with self._changed:
                    self._output += chunk
                    del self._output[:-_KEPT_OUTPUT_BYTES]
                    self._changed.notify_all()
                if self._sink is not None:
                    self._sink(self._rank, chunk)
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def _wait(self) -> None:
        # WNOWAIT keeps the pid, and with it the number of the process group, ours until the rest of the group is killed too.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            self._signal(signal.SIGKILL)
            self._popen.wait()
        self._reader.join(_STRAGGLER_S)
        self._ended.put(self._rank)

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def kill(self, signum: int) -> None:
        """Signals the rank and what it started; nothing happens once it has ended."""
        with self._reaping:
            if self.returncode is None:
                self._signal(signum)

    def expect(self, text: str, timeout: float) -> None:
        wanted = text.encode()
        with self._changed:
            self._changed.wait_for(lambda: wanted in self._output or self._complete, timeout)
            if wanted in self._output:
                return
            why = "ended without printing" if self._complete else f"didn't print within {timeout:g} s"
        raise LaunchError(f"rank {self._rank} {why} {text!r}", [self.result()])

    def result(self) -> Result:
        with self._changed:
            return Result(self._rank, self.returncode, self._output.decode(errors="replace"))

    def join(self) -> None:
        self._waiter.join()


class Ranks:
    """The running processes of a job. A context manager: leaving it ends every rank that still runs.

    Args:
      program: `[script.py, args...]` or `["-m", module, args...]`, run by this interpreter.
      processes: how many ranks to start here.
      devices: CPU devices per rank; this also selects the CPU platform. None leaves both to JAX and its environment.
      gpus: GPUs of this host, by number, dealt to the ranks in turns, one each; fewer than ranks are shared. None leaves them all to every
        rank. JAX alone is told: copies to GPUs that CUDA_VISIBLE_DEVICES hides are slower and don't overlap with computation.
      env: variables on top of this process's environment.
      echo: gets all output as it comes, e.g. `prefixed(sys.stdout.buffer)`; None collects it silently.
      join_job: False leaves `jax.distributed.initialize` to the program, which finds its three arguments in the environment:
        JAX_COORDINATOR_ADDRESS, HOCCL_LAUNCH_WORLD and HOCCL_LAUNCH_RANK (set in any case). A job of one rank has nobody to join: it runs
        as the program alone would.
      command: what to put in front of each rank's command line, for instance `["numactl", "--cpunodebind=0"]`. It must end in that
        program by exec.
      coordinator: `host:port` of rank 0 in a job over several hosts; None takes a free port of the loopback interface.
      first_rank, world: this launcher's first rank, and the number of ranks in the whole job (None: the last one is started here).
      heartbeat_timeout_s: seconds without a sign of life after which JAX's coordination service gives a process up.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        processes: int,
        devices: int | None = None,
        gpus: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        echo: Sink | None = None,
        join_job: bool = True,
        command: Sequence[str] = (),
        coordinator: str | None = None,
        first_rank: int = 0,
        world: int | None = None,
        heartbeat_timeout_s: int = 100,
    ):
        world = first_rank + processes if world is None else world
        if not program or processes < 1 or first_rank < 0 or first_rank + processes > world:
            raise ValueError(f"can't launch {list(program)} as ranks {first_rank} to {first_rank + processes - 1} of {world}")
        coordinator = coordinator or f"127.0.0.1:{free_port()}"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "JAX_COORDINATOR_ADDRESS": coordinator, "HOCCL_LAUNCH_WORLD": str(world)}
        if devices is not None:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        environment |= env or {}
        lifeline, self._lifeline = os.pipe()
        # By path and with -P: the child's module search path is what the program would see, wherever this package lies.
        argv = [*command, sys.executable, "-P", str(pathlib.Path(__file__).with_name("_rank.py")), f"--lifeline={lifeline}"]
        if join_job and world > 1:
            argv += [f"--coordinator={coordinator}", f"--world={world}", f"--heartbeat-timeout-s={heartbeat_timeout_s}"]
        self._ended: queue.Queue[int] = queue.Queue()
        self._processes: dict[int, _Process] = {}
        self._first_failed: int | None = None
        try:
            for rank in range(first_rank, first_rank + processes):
                own = {**environment, "HOCCL_LAUNCH_RANK": str(rank)}
                if gpus:
                    own["JAX_LOCAL_DEVICE_IDS"] = gpus[(rank - first_rank) % len(gpus)]
                self._processes[rank] = _Process(rank, [*argv, f"--rank={rank}", "--", *program], own, lifeline, echo, self._ended)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(lifeline)
        self._running = set(self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank and to everything that it started."""
        self._processes[rank].kill(signum)

    def expect(self, rank: int, text: str, timeout: float) -> None:
        """Returns once `rank` has printed `text`. LaunchError when it ends, or `timeout` seconds pass, without that."""
        self._processes[rank].expect(text, timeout)

    @property
    def first_failed(self) -> Result | None:
        """The first rank that `wait` saw failing, the likely cause of later failures."""
        return None if self._first_failed is None else self._processes[self._first_failed].result()

    def results(self) -> list[Result]:
        """The results so far, in rank order."""
        return [self._processes[rank].result() for rank in sorted(self._processes)]

    def wait(self, timeout: float | None = None, *, grace_s: float | None = 5.0) -> list[Result]:
        """Waits until every rank has ended and returns the results in rank order, those of failed ranks included.

        Args:
          timeout: seconds from now, after which the ranks that still run are killed and LaunchError is raised. None waits for ever.
          grace_s: how long ranks may go on after another one failed; then they are killed. None: a failure changes nothing for the others.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        grace_end: float | None = None
        while self._running:
            ends = [end for end in (deadline, grace_end) if end is not None]
            try:
                rank = self._ended.get(timeout=max(0.0, min(ends) - time.monotonic()) if ends else None)
            except queue.Empty:
                late, self._running = self._running, set()
                self._end(late)
                if grace_end is not None and min(ends) == grace_end:
                    break
                raise LaunchError(f"ranks {sorted(late)} still ran after {timeout:g} s and were killed", self.results()) from None
            self._running.discard(rank)
            if self._processes[rank].returncode != 0 and self._first_failed is None:
                self._first_failed = rank
                grace_end = None if grace_s is None else time.monotonic() + grace_s
        return self.results()

    def _end(self, ranks: set[int]) -> None:
        for rank in ranks:
            self._processes[rank].kill(signal.SIGKILL)
        for rank in ranks:
            self._processes[rank].join()

    def close(self) -> None:
        """Kills what still runs and waits for its end. Idempotent."""
        if self._lifeline >= 0:
            self._end(set(self._processes))
            os.close(self._lifeline)
            self._lifeline = -1


def run(
    program: Sequence[str],
    *,
    processes: int,
    devices: int | None = None,
    gpus: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    echo: Sink | None = None,
    timeout: float | None = 600.0,
) -> list[Result]:
    """Runs a job to its end and returns the results in rank order; LaunchError, with each rank's last output, unless all ranks exit with 0.

    Args: as of `Ranks`; `timeout` is in seconds, for the whole job.
    """
    with Ranks(program, processes=processes, devices=devices, gpus=gpus, env=env, echo=echo) as ranks:
        results = ranks.wait(timeout)
        if ranks.first_failed is not None:
            raise LaunchError(f"rank {ranks.first_failed.rank} failed first", results)
    return results


def _parse(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """The launcher's own options and the program with its arguments. flags.Error for what can't be launched."""
    # Not the global flags: those belong to the program that imports this module.
    values = flags.FlagValues()
    values.set_gnu_getopt(False)  # options after the program are the program's
    flags.DEFINE_integer("processes", 2, "Ranks to start on this host.", lower_bound=1, short_name="n", flag_values=values)
    flags.DEFINE_integer(
        "devices", None, "CPU devices per rank (selects the CPU platform); unset: JAX decides.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_list(
        "gpus", None, "GPUs of this host, dealt to its ranks in turns, one each; unset: each sees them all.", flag_values=values
    )
    flags.DEFINE_float(
        "timeout", None, "Seconds after which a job that still runs is killed; unset: never.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_string("coordinator", None, "host:port of rank 0, for a job over several hosts.", flag_values=values)
    flags.DEFINE_integer("first_rank", 0, "The first rank on this host.", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("world", None, "Ranks of the whole job; unset: the last one is on this host.", lower_bound=1, flag_values=values)
    flags.DEFINE_bool("help", False, "Print this help.", flag_values=values)
    at = argv.index("-m") if "-m" in argv else len(argv)  # `-m module` ends the launcher's options as it ends the interpreter's
    program = [*values(list(argv[:at]))[1:], *argv[at:]]
    if values.help or not program or program == ["-m"]:
        raise flags.Error(f"{__doc__}\n{values}" if values.help else "no program to run: give script.py or -m module (see --help)")
    return values, program


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    try:
        values, program = _parse(argv)
        ranks = Ranks(
            program,
            processes=values.processes,
            devices=values.devices,
            gpus=values.gpus,
            echo=prefixed(sys.stdout.buffer),
            coordinator=values.coordinator,
            first_rank=values.first_rank,
            world=values.world,
        )
    except (flags.Error, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    with ranks:
        try:
            ranks.wait(values.timeout)
        except LaunchError as error:
            print(str(error).splitlines()[0], file=sys.stderr)
            return 124  # as timeout(1)
        except KeyboardInterrupt:
            return 130
        if ranks.first_failed is None:
            return 0
        code = ranks.first_failed.returncode or 1
        print(f"rank {ranks.first_failed.rank} failed first, with exit code {code}", file=sys.stderr)
        return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
