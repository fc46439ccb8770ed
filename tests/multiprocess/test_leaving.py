"""A process that is done may leave while others are still busy with the same program."""

from __future__ import annotations

from tests.multiprocess import jobs


def test_process_that_leaves_delivers_what_it_sent_and_disturbs_nobody() -> None:
    sender, receiver, bystander = jobs.run("leaving", processes=3, devices=1, env={"HOCCL_TIMEOUT_S": "20"})
    assert "values" in sender[0]["exchange"]
    assert receiver[0]["exchange"].get("values") == [[0.0, 1.0]], receiver
    assert bystander[0]["exchange"].get("values") == [[0.0, 0.0]], bystander
