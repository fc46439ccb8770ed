"""Whatever goes wrong on one rank, every surviving rank gets an exception that says what, in bounded time, and the next program runs."""

from __future__ import annotations

import re
import signal
from typing import Any

from tests.multiprocess import jobs

_TIMEOUT_S = 4.0  # HOCCL_TIMEOUT_S of the jobs: longer than the skew of ranks that start together, also on a loaded machine
_TICK_S = 2.0  # how much later than that the error may come
_LOST_S = 2.0  # how soon the death of a process must be noticed


def run(scenario: str, *args: str, processes: int = 2, devices: int = 2, timeout_s: float = _TIMEOUT_S) -> list[dict[str, Any]]:
    """Runs a scenario of programs/failures.py to its end; returns each rank's reports, merged."""
    env = {"HOCCL_TIMEOUT_S": str(timeout_s)}
    ranks = jobs.run("failures", scenario, *args, processes=processes, devices=devices, env=env)
    return [merged(reports) for reports in ranks]


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: fact for report in reports for name, fact in report.items()}


def assert_next_program_ran(ranks: list[dict[str, Any]], devices: int = 2) -> None:
    n = len(ranks) * devices
    assert [rank["next"]["values"] for rank in ranks] == [[[float(i + 1) for i in range(n)]] * devices] * len(ranks)


def assert_came_in_time(outcome: dict[str, Any]) -> None:
    assert "error" in outcome
    assert outcome["seconds"] < _TIMEOUT_S + _TICK_S


def test_killed_process_is_named_by_every_survivor_within_two_seconds() -> None:
    with jobs.start("failures", "killed", "1", processes=3, devices=1, env={"HOCCL_TIMEOUT_S": "60"}) as job:
        results = job.wait(jobs.DEADLINE_S, grace_s=None)
    assert [r.returncode for r in results] == [0, -signal.SIGKILL, 0], [r.output for r in results]
    ranks = [merged(jobs.reports(result)) for result in results]
    for survivor in (ranks[0], ranks[2]):
        doomed = survivor["doomed"]
        assert 0 < doomed["at"] - ranks[1]["died_at"] < _LOST_S
        assert "all_gather float32[262144]" in doomed["error"]
        assert "communicator {0, 2048, 4096}" in doomed["error"]
        assert re.search(jobs.lost(1), doomed["error"])
        # The next program that needs the dead says in one line why it can't run; one of the living alone runs.
        assert survivor["again"]["seconds"] < _LOST_S
        assert "process 1 has died" in survivor["again"]["error"]
        assert "\n" not in survivor["again"]["error"].strip()
        assert survivor["next"]["values"] == [[0.0, 1.0]]


def test_killed_coordinator_is_named_before_jax_ends_the_survivors() -> None:
    """JAX's coordination service lives in process 0; without it JAX aborts the others, which may cut the program short after the error."""
    with jobs.start("failures", "killed", "0", processes=3, devices=1, env={"HOCCL_TIMEOUT_S": "60"}) as job:
        results = job.wait(jobs.DEADLINE_S, grace_s=None)
    ranks = [merged(jobs.reports(result)) for result in results]
    for survivor in ranks[1:]:
        assert 0 < survivor["doomed"]["at"] - ranks[0]["died_at"] < _LOST_S
        assert re.search(jobs.lost(0), survivor["doomed"]["error"])


def test_ranks_that_disagree_learn_what_each_brought() -> None:
    brought = {
        "shape": ("all_gather float32[4]", "all_gather float32[8]"),
        "dtype": ("all_gather float32[4]", "all_gather int32[4]"),
        "kind": ("all_gather float32[4]", "all_to_all float32[4]"),
        "groups": ("all_gather float32[4] along axis 0 over 4 ranks", "all_gather float32[4] along axis 0 over 2 ranks"),
        "permutation": ("0->3, 1->0, 2->1, 3->2", "0->1, 1->2, 2->3, 3->0"),
    }
    ranks = run("disagree", timeout_s=0.5 * _TIMEOUT_S)  # there are five deadlines to wait for
    for rank in ranks:
        for what, (even, odd) in brought.items():
            assert_came_in_time(rank[what])
            assert even in rank[what]["error"]
            assert odd in rank[what]["error"]
            assert f"call site jit_step_{what}" in rank[what]["error"]
    assert_next_program_ran(ranks)


def test_ranks_in_different_programs_learn_where_the_others_wait() -> None:
    ranks = run("other_program")
    for rank, (own, others) in zip(ranks, [("jit_left", (2048, 2049)), ("jit_right", (0, 1))], strict=True):
        assert_came_in_time(rank["missed"])
        assert f"call site {own}" in rank["missed"]["error"]
        for device in others:
            assert f"(device {device}, process" in rank["missed"]["error"]
            assert f"device {device} wait" in rank["missed"]["error"]
    assert_next_program_ran(ranks)


def test_rank_that_never_comes_is_named_at_the_deadline() -> None:
    ranks = run("never_comes")
    missed = ranks[0]["missed"]
    assert_came_in_time(missed)
    assert missed["seconds"] >= _TIMEOUT_S
    assert "DEADLINE_EXCEEDED" in missed["error"]
    assert "rank 1 (device 1, process 0) came" in missed["error"]
    assert "rank 2 (device 2048, process 1) has not come" in missed["error"]
    assert "rank 3 (device 2049, process 1) has not come" in missed["error"]
    assert_next_program_ran(ranks)


def test_late_rank_is_waited_for() -> None:
    delay_s = 1.5
    ranks = run("late", str(delay_s), timeout_s=60)
    assert [rank["late"]["values"] for rank in ranks] == [[[0.0, 1.0, 2.0, 3.0]] * 2] * 2
    assert ranks[0]["late"]["seconds"] > 0.5 * delay_s, "process 0 should have come first"
    assert_next_program_ran(ranks)


def test_rank_that_comes_too_late_gets_the_others_error_at_once() -> None:
    ranks = run("too_late")
    assert_came_in_time(ranks[0]["late"])
    assert ranks[1]["late"]["seconds"] < 0.5 * _TIMEOUT_S
    for rank in ranks:
        assert "rank 2 (device 2048, process 1) has not come" in rank["late"]["error"]
    assert_next_program_ran(ranks)
