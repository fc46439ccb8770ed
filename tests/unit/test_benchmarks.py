"""The CPU benchmark measures what it says and judges targets honestly; JAX's own tests run on the side that they are said to."""

from __future__ import annotations

import json
import pathlib
import textwrap

import numpy as np
import pytest

from benchmarks import cpu, jax_tests, report
from benchmarks.memcpy import Memcpy
from benchmarks.report import Row, Samples
from hoccl_jax.tools import launch

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 1)])
def test_every_operation_is_sampled_in_every_layout(tmp_path: pathlib.Path, processes: int, devices: int) -> None:
    output = tmp_path / "samples.json"
    program = ["-m", "benchmarks.collectives", "--sizes=16,131072", "--repeats=2", f"--output={output}"]
    launch.run(program, processes=processes, devices=devices, timeout=120)
    cases = [Samples(**case) for case in json.loads(output.read_text())]
    assert [(c.operation, c.size) for c in cases] == [
        (op, size) for size in (16, 1 << 17) for op in ("all_gather", "all_to_all", "ppermute")
    ]
    for case in cases:
        assert len(case.hoccl) == len(case.lax) == 2
        assert len(case.memcpy) == (0 if case.size == 16 else 2)
        assert min(case.hoccl + case.lax) > 0


def test_default_malloc_is_not_inherited_from_a_tuned_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def run_layout(layout: str, malloc: str, sizes: object, repeats: int) -> list[Samples]:
        seen.append({name: value for name, value in cpu.os.environ.items() if name.startswith("MALLOC_")})
        return []

    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setattr(cpu, "run_layout", run_layout)
    cpu.flags.FLAGS(["cpu"])
    cpu.main(["cpu"])
    assert seen == [{}] * 6


def test_memcpy_copies_all_bytes() -> None:
    memcpy = Memcpy(1 << 20)
    assert memcpy.seconds() > 0
    copied = np.concatenate(memcpy._targets)
    memcpy.close()
    assert copied.size == 1 << 20
    assert (copied == 1).all()


def row(
    hoccl: float, lax: float, *, layout: str = "2x1", malloc: str = "tuned", operation: str = "ppermute", size: int = report.LARGE
) -> Row:
    return Row(layout, malloc, Samples(operation, size, [hoccl] * 3, [lax] * 3, [hoccl / 2] * 3 if size > 16 else []))


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (row(1.0, 1.5), "met"),
        (row(1.0, 1.49), "missed"),
        (row(1.0, 0.1, malloc="default"), ""),
        (row(1.0, 0.99, malloc="default", size=16), "missed"),
        (row(1.0, 2.99, layout="1x4", operation="all_to_all"), "missed"),
        (row(1.0, 3.0, layout="1x4", operation="all_to_all"), "met"),
    ],
)
def test_verdict_compares_medians_with_the_target(measured: Row, verdict: str) -> None:
    assert measured.cells()[-1] == verdict


def test_table_counts_targets_and_gives_the_share_of_memcpy() -> None:
    text = report.table([row(1.0, 2.0), row(1.0, 1.0)])
    assert text.endswith("1 of 2 targets met.")
    assert "| 50%" in text
    assert "2.00 (2.00..2.00)" in text


def test_page_and_plot_are_written(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.svg"
    cases = [Samples("ppermute", size, [1e-3] * 3, [2e-3] * 3, [5e-4] * 3 if size > 1 << 16 else []) for size in (64, 1 << 20)]
    report.plot({"1x4": cases, "2x1": cases}, picture)
    assert "<svg" in picture.read_text()
    assert "(sweep.svg)" in report.page("facts", "table", picture.name)


def test_jax_tests_are_compared_test_by_test(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ring_test.py"
    file.write_text(
        textwrap.dedent(
            """
            import jax, numpy as np
            jax.config.update("jax_num_cpu_devices", 2)

            @jax.jit
            def ring(x):
                mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
                swap = lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)])
                return jax.shard_map(swap, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))(x)

            def test_values(): np.testing.assert_array_equal(ring(np.arange(2)), [1, 0])
            def test_text(): assert "collective_permute" in ring.lower(np.arange(2)).as_text(), "no permute"
            def test_wrong(): assert False
            """
        )
    )
    lax, hoccl = (jax_tests.run(file, [], override=override, timeout=60) for override in (False, True))
    assert lax.outcomes == {"test_values": "passed", "test_text": "passed", "test_wrong": "failed"}
    assert hoccl.outcomes == {**lax.outcomes, "test_text": "failed"}
    assert lax.stats is None
    text = jax_tests.report(lax, hoccl)
    assert "| jax.lax | 2 | 1 | 0 |\n| hoccl_jax | 1 | 2 | 0 |" in text
    assert "- `test_text`: passed on jax.lax, failed on hoccl_jax. AssertionError: no permute" in text
    assert "- `test_wrong`: fails on both" in text
    assert "The engine ran {'ppermute': 2}; call sites left to XLA: {}; failures: 0." in text
