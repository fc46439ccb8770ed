"""A pytest plugin that writes what became of each test into a file: benchmarks.jax_tests starts pytest with it."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

# Before any test imports anything, as a program would do it. The side of jax.lax alone shall not see the library at all.
if os.environ.get("HOCCL_OVERRIDE_LAX", "0") == "1":
    import hoccl_jax

_outcomes: dict[str, str] = {}
_messages: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", required=True, help="file for the outcomes, as JSON")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.split("::", 1)[1]
    if report.when == "call" or report.outcome != "passed":  # what fails in set-up or tear-down counts for the test
        _outcomes[name] = report.outcome
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _messages[name] = str(crash.message if crash else report.longrepr)


def pytest_sessionfinish(session: pytest.Session) -> None:
    stats = hoccl_jax.stats() if "hoccl_jax" in globals() else None
    record = {"outcomes": _outcomes, "messages": _messages, "stats": stats}
    pathlib.Path(session.config.getoption("--record")).write_text(json.dumps(record))
