"""Processes meet though their executables differ in what does not matter: where they were called, and whether they came from a cache; and
executables that differ in what matters are told apart though they have one name."""

from __future__ import annotations

import pathlib

from tests.multiprocess import jobs


def _check(*args: str) -> None:
    for (report,) in jobs.run("unlike", *args, processes=2, devices=2, env={"HOCCL_TIMEOUT_S": "30"}):
        assert len(report["right"]) >= 6
        assert all(report["right"])
        assert report["stats"]["failures"] == 0
        assert report["stats"]["operations"]["all_gather"] == len(report["right"])


def test_called_from_different_lines() -> None:
    _check("lines")


def test_of_one_name_in_different_groups() -> None:
    _check("groups")


def test_from_the_persistent_cache(tmp_path: pathlib.Path) -> None:
    for _ in range(2):
        _check("cache", str(tmp_path))
    assert list(tmp_path.iterdir())
