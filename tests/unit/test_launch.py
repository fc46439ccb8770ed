"""The launcher: jobs run as several processes, failures end them, and nothing outlives the launcher."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from hoccl_jax.tools import launch

pytestmark = pytest.mark.any_jax

LAUNCH = [sys.executable, "-P", launch.__file__]  # by path, since some tests run elsewhere and the package need not be installed
_START_S = 60.0  # for processes to start on a loaded machine

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Write:
    """Writes a program and returns its path."""

    def write_program(source: str, name: str = "program.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write_program


def ends_within(pidfd: int, seconds: float) -> bool:
    """Whether the process behind `pidfd` ends within that time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def cli(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAUNCH, *args], capture_output=True, text=True, timeout=2 * _START_S, check=False, **kwargs)


JOB = """
    import sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), "x")
    n = jax.device_count()
    ranks = jax.make_array_from_callback((n,), NamedSharding(mesh, P("x")), lambda index: np.arange(n)[index])
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))(ranks)
    print(f"process {jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} devices, sum {total[0]}, {sys.argv[1:]}\\n")
"""


def test_processes_form_one_jax_job(write: Write) -> None:
    results = launch.run([write(JOB), "--steps", "3"], processes=2, devices=3, timeout=_START_S)
    assert [r.rank for r in results] == [0, 1]
    for r in results:
        assert r.returncode == 0
        assert f"process {r.rank} of 2, 3 devices, sum 15, ['--steps', '3']" in r.output


def test_two_launchers_share_a_job(write: Write) -> None:
    program, coordinator = [write(JOB)], f"127.0.0.1:{launch.free_port()}"
    with (
        launch.Ranks(program, processes=1, devices=2, coordinator=coordinator, first_rank=1, world=2) as second,
        launch.Ranks(program, processes=1, devices=2, coordinator=coordinator, world=2) as first,
    ):
        results = first.wait(_START_S) + second.wait(_START_S)
    assert [(r.rank, r.returncode) for r in results] == [(0, 0), (1, 0)]
    assert "process 1 of 2, 2 devices, sum 6" in results[1].output


def test_program_may_join_the_job_itself(write: Write) -> None:
    program = write("""
        import os, jax
        jax.distributed.initialize(num_processes=int(os.environ["HOCCL_LAUNCH_WORLD"]), process_id=int(os.environ["HOCCL_LAUNCH_RANK"]))
        print("joined as", jax.process_index(), "of", jax.process_count())
    """)
    with launch.Ranks([program], processes=2, devices=1, join_job=False) as ranks:
        results = ranks.wait(_START_S)
    assert [f"joined as {r.rank} of 2" in r.output for r in results] == [True, True]


def test_module_and_neighbouring_imports_resolve_as_in_the_interpreter(write: Write, tmp_path: pathlib.Path) -> None:
    write("VALUE = 7\n", "neighbour.py")
    script = write("import sys, neighbour\nprint(neighbour.VALUE, __name__, sys.argv)\n", "script.py")
    completed = cli("-n", "1", script, "-m", "x", cwd="/")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == f"[0] 7 __main__ {[script, '-m', 'x']}\n"
    completed = cli("-n", "1", "-m", "script", "--flag", cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == f"[0] 7 __main__ {[script, '--flag']}\n"


def test_failure_is_named_and_ends_the_others(write: Write) -> None:
    program = write("""
        import os, sys, threading
        if os.environ["HOCCL_LAUNCH_RANK"] == "1":
            sys.exit("rank one gives up")
        threading.Event().wait()
    """)
    with launch.Ranks([program], processes=3, join_job=False) as ranks:
        results = ranks.wait(_START_S, grace_s=0.1)
        assert ranks.first_failed == results[1]
    assert [r.returncode for r in results] == [-signal.SIGKILL, 1, -signal.SIGKILL]
    assert results[1].output == "rank one gives up\n"


def test_survivors_may_go_on_after_a_kill(write: Write) -> None:
    program = write("""
        import os
        if os.environ["HOCCL_LAUNCH_RANK"] == "1":
            print("waiting")
            os.read(os.pipe()[0], 1)
        print("done")
    """)
    with launch.Ranks([program], processes=2, join_job=False) as ranks:
        ranks.expect(1, "waiting\n", _START_S)
        ranks.kill(1)
        results = ranks.wait(_START_S, grace_s=None)
    assert [(r.returncode, r.output) for r in results] == [(0, "done\n"), (-signal.SIGKILL, "waiting\n")]


def test_run_reports_each_ranks_output(write: Write) -> None:
    with pytest.raises(launch.LaunchError, match=r"(?s)rank [01] failed first.*rank 0, exit code 3.*no luck"):
        launch.run([write("import sys; print('no luck'); sys.exit(3)")], processes=2, timeout=_START_S)


def test_deadline_ends_the_job_and_its_grandchildren(write: Write, tmp_path: pathlib.Path) -> None:
    program = write("""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        print("child", child.pid, flush=True)
        child.wait()
    """)
    with launch.Ranks([program], processes=1, join_job=False) as ranks:
        ranks.expect(0, "\n", _START_S)
        grandchild = os.pidfd_open(int(ranks.results()[0].output.split()[1]))
        started = time.monotonic()
        with pytest.raises(launch.LaunchError, match=r"ranks \[0\] still ran after 0.2 s"):
            ranks.wait(0.2)
        assert time.monotonic() - started < 10
    assert ends_within(grandchild, 10)
    os.close(grandchild)


def test_expect_fails_when_the_rank_ends_or_stays_silent(write: Write) -> None:
    with (
        launch.Ranks([write("print('something else')")], processes=1, join_job=False) as ranks,
        pytest.raises(launch.LaunchError, match=r"(?s)rank 0 ended without printing 'ready'.*something else"),
    ):
        ranks.expect(0, "ready", _START_S)
    with (
        launch.Ranks([write("import threading; threading.Event().wait()")], processes=1, join_job=False) as ranks,
        pytest.raises(launch.LaunchError, match=r"rank 0 didn't print within 0.1 s 'ready'"),
    ):
        ranks.expect(0, "ready", 0.1)


def test_nothing_outlives_a_killed_launcher(write: Write) -> None:
    program = write("""
        import os, subprocess, sys, threading
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        print("pids", os.getpid(), child.pid, flush=True)
        threading.Event().wait()
    """)
    launcher = subprocess.Popen([*LAUNCH, "-n", "2", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    with launcher.stdout:
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()[2:]]
        assert len(pids) == 4
        pidfds = [os.pidfd_open(pid) for pid in pids]
        launcher.kill()
        launcher.wait()
    assert [ends_within(fd, 10) for fd in pidfds] == [True] * 4
    for fd in pidfds:
        os.close(fd)


@pytest.mark.parametrize(
    ("source", "code"), [("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 128 + 9), ("print('fine')", 0)]
)
def test_exit_code_is_that_of_the_failed_rank(write: Write, source: str, code: int) -> None:
    assert cli("-n", "1", write(source)).returncode == code


def test_bad_command_lines_say_what_is_wrong(write: Write) -> None:
    for args, message in [
        ((), "no program to run"),
        (("-m",), "no program to run"),
        (("--no_such_option", "x.py"), "no_such_option"),
        (("-n", "0", "x.py"), "processes"),
        (("-n", "2", "--world", "1", "x.py"), "ranks 0 to 1 of 1"),
    ]:
        completed = cli(*args)
        assert completed.returncode == 2
        assert message in completed.stderr
    assert cli("--timeout", "0.1", write("import threading; threading.Event().wait()")).returncode == 124
    with pytest.raises(ValueError, match="can't launch"):
        launch.Ranks([], processes=2)
