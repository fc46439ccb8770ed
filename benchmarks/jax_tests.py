"""JAX's own tests with the collectives of `jax.lax` on hoccl_jax, beside the same tests on JAX alone.

    git -C ~/jax checkout jax-v0.11.0                                            # JAX's repository; take the installed release
    python -m benchmarks.jax_tests ~/jax/tests/shard_map_test.py
    python -m benchmarks.jax_tests ~/jax/tests/shard_map_test.py -- -k ppermute  # with arguments for pytest

Each side is a process of its own, on CPU devices unless JAX_PLATFORMS says otherwise, and takes the installed jax, not the checkout's.
What is printed last is Markdown: counts for both sides, tests whose outcome differs, and what the engine counted. The exit status is 1 if
a test that JAX alone passes does not pass with hoccl_jax.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import app, flags

_TIMEOUT = flags.DEFINE_integer("timeout", 900, "Seconds for one test.", lower_bound=1)

_ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Side:
    """What became of the tests: outcomes ("passed", "failed", "skipped") and messages of failures by test, the engine's `stats()`."""

    outcomes: Mapping[str, str]
    messages: Mapping[str, str]
    stats: Mapping[str, Any] | None

    def counts(self) -> str:
        counted = collections.Counter(self.outcomes.values())
        return " | ".join(str(counted[outcome]) for outcome in ("passed", "failed", "skipped"))


def run(test: pathlib.Path, arguments: Sequence[str], *, override: bool, timeout: int) -> Side:
    with tempfile.TemporaryDirectory() as folder:
        record = pathlib.Path(folder) / "record.json"
        plugins = ["-p", "no:cacheprovider", "-p", "benchmarks.jax_tests_recorder", f"--record={record}", f"--timeout={timeout}"]
        # Without the checkout's settings: its conftest.py would put the checkout's jax before the installed one.
        settings = ["-c", os.devnull, f"--rootdir={test.parent}", "--noconftest", "--import-mode=importlib", "-q"]
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"JAX_PLATFORMS": "cpu"} | os.environ | {"PYTHONPATH": path, "HOCCL_OVERRIDE_LAX": str(int(override))}
        command = [sys.executable, "-m", "pytest", *settings, *plugins, str(test), *arguments]
        ended = subprocess.run(command, cwd=test.parent, env=environment, stdout=sys.stderr, check=False)
        if not record.exists():
            raise RuntimeError(f"pytest ended with status {ended.returncode} before it ran the tests: {command}")
        return Side(**json.loads(record.read_text()))


def differences(lax: Side, hoccl: Side) -> list[str]:
    """Tests whose outcome is not that on JAX alone."""
    return [name for name in dict.fromkeys((*lax.outcomes, *hoccl.outcomes)) if lax.outcomes.get(name) != hoccl.outcomes.get(name)]


def report(lax: Side, hoccl: Side) -> str:
    assert hoccl.stats is not None
    lines = [
        f"Python {platform.python_version()}, jax {jax.__version__}",
        "",
        "| collectives | passed | failed | skipped |",
        "|---|---|---|---|",
        f"| jax.lax | {lax.counts()} |",
        f"| hoccl_jax | {hoccl.counts()} |",
        "",
    ]
    for name in differences(lax, hoccl):
        said = (hoccl.messages.get(name) or lax.messages.get(name) or "").strip().split("\n")[0][:120]
        lines.append(f"- `{name}`: {lax.outcomes.get(name)} on jax.lax, {hoccl.outcomes.get(name)} on hoccl_jax. {said}")
    both = [name for name, outcome in lax.outcomes.items() if outcome == hoccl.outcomes.get(name) == "failed"]
    lines += [f"- `{name}`: fails on both" for name in both]
    operations = {kind: count for kind, count in hoccl.stats["operations"].items() if count}
    lines += ["", f"The engine ran {operations}; call sites left to XLA: {hoccl.stats['fallbacks']}; failures: {hoccl.stats['failures']}."]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2:
        raise app.UsageError("wants the path of a test file of JAX")
    test = pathlib.Path(argv[1]).resolve(strict=True)
    lax, hoccl = (run(test, argv[2:], override=override, timeout=_TIMEOUT.value) for override in (False, True))
    print(report(lax, hoccl))
    sys.exit(any(lax.outcomes[name] == "passed" for name in differences(lax, hoccl) if name in lax.outcomes))


if __name__ == "__main__":
    app.run(main)
