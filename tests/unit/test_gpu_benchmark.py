"""The benchmark of several GPUs, without one: what it would ask of NCCL, and the tables and the plot of what it measured."""

from __future__ import annotations

import ctypes
import json
import pathlib
import types
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_page, gpu_programs, gpu_shared, nccl_direct

pytestmark = pytest.mark.any_jax


def test_the_configuration_is_laid_out_as_in_nccls_header() -> None:
    """Offsets and size that a C++ compiler gives ncclConfig_t of NCCL 2.28.9."""
    offsets = [0, 8, 12, 16, 20, 24, 28, 32, 40, 44, 48, 56, 60, 64, 68, 72, 76]
    assert [getattr(nccl_direct.Config, name).offset for name, *_ in nccl_direct.Config._fields_] == offsets
    assert ctypes.sizeof(nccl_direct.Config) == 80
    assert ctypes.sizeof(nccl_direct.UniqueId) == 128


def test_a_configuration_sets_the_policy_and_nothing_else() -> None:
    words = np.frombuffer(bytes(nccl_direct.Config.with_policy(2)), np.uint32)
    left_open = 1 << 31
    assert list(words[:4]) == [80, 0, 0xCAFEBEEF, 22800]
    assert list(words[4:8]) == [left_open] * 4
    assert list(words[8:]) == [0, 0, left_open, left_open, 0, 0, left_open, 2, *[left_open] * 4]


def rank(number: int) -> nccl_direct.Rank:
    gpu: Any = types.SimpleNamespace(stream=f"stream {number}")
    comm: Any = f"comm {number}"
    return nccl_direct.Rank(number, gpu, comm, ctypes.c_void_p(1000 * (number + 1)), ctypes.c_void_p(1000 * (number + 1) + 500))


def transfers(operation: str, world: int, size: int) -> list[tuple[int, int, int, int, int]]:
    """(source, destination, from, to, bytes) of sends and their receives, which must match in pairs, in order."""
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number in range(world):
        for name, pointer, count, kind, peer, comm, stream in nccl_direct.calls(operation, rank(number), world, size, False):
            assert (kind, comm, stream) == (1, f"comm {number}", f"stream {number}")
            into, pair = (sent, (number, peer)) if name == "ncclSend" else (received, (peer, number))
            into.setdefault(pair, []).append((pointer.value, count))
    assert sent.keys() == received.keys()
    found = []
    for pair, sends in sent.items():
        for (source, count), (target, expected) in zip(sends, received[pair], strict=True):
            assert count == expected
            found.append((*pair, source - 1000 * (pair[0] + 1), target - 1000 * (pair[1] + 1) - 500, count))
    return sorted(found)


def test_point_to_point_operations_move_what_they_should() -> None:
    assert transfers("ppermute", 3, 64) == [(0, 1, 0, 0, 64), (1, 2, 0, 0, 64), (2, 0, 0, 0, 64)]
    assert transfers("send", 3, 64) == [(0, 1, 0, 0, 64)]
    assert transfers("all_to_all", 2, 64) == [(0, 0, 0, 0, 32), (0, 1, 32, 0, 32), (1, 0, 0, 32, 32), (1, 1, 32, 32, 32)]
    with pytest.raises(ValueError, match="unknown operation 'reduce'"):
        nccl_direct.calls("reduce", rank(0), 2, 64, True)


def test_collectives_are_called_with_nccls_arguments() -> None:
    """Each has as many as the function takes, and those of a group stand in one."""
    for operation in nccl_direct.OPERATIONS:
        both = [call for number in range(2) for call in nccl_direct.calls(operation, rank(number), 2, 64, True)]
        assert {len(arguments) - len(nccl_direct._TYPES[name]) for name, *arguments in both} == {0}
        names = [call[0] for call in nccl_direct.grouped(both)]
        assert (names[0], names[-1]) == ("ncclGroupStart", "ncclGroupEnd")
    (only,) = nccl_direct.calls("all_to_all", rank(1), 2, 64, True)
    assert only[0] == "ncclAlltoAll"
    assert only[3] == 32  # what each other rank gets
    assert nccl_direct.grouped([only]) == [only]


def test_broadcasts_that_hang_are_left_out() -> None:
    left_out = {
        (form, operation, size)
        for form in nccl_direct.FORMS
        for operation in nccl_direct.OPERATIONS
        for size in (1 << 20, 8 << 20, 1 << 30)
        if nccl_direct.left_out(form, operation, size)
    }
    assert left_out == {("zero-CTA", "broadcast", 8 << 20), ("zero-CTA", "broadcast", 1 << 30)}


class StubDriver:
    """In place of peer_copy.Driver: notes the calls, and hands out an address for each allocation. No copy is made."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.sizes: dict[int, int] = {}

    def __call__(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name == "cuMemAlloc_v2":
            address, size = arguments
            address._obj.value = 1000 * (len(self.sizes) + 1)
            self.sizes[address._obj.value] = size.value


def test_a_bare_copy_goes_from_one_buffer_to_another_of_its_size() -> None:
    driver: Any = StubDriver()
    copies = gpu_shared.BareCopies(driver, 0, SIZE)
    copies.start()
    copies.wait()
    ((target, source, size, _),) = [call[1:] for call in driver.calls if call[0] == "cuMemcpyAsync"]
    assert target.value != source.value
    assert driver.sizes[target.value] == driver.sizes[source.value] == size.value == SIZE
    copies.free()
    assert [call[1].value for call in driver.calls if call[0] == "cuMemFree_v2"] == list(driver.sizes)


def test_nccl_is_the_one_that_the_process_has_loaded(tmp_path: pathlib.Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 42   /a b/libnccl.so.2\n7f02-7f03 r-xp 00000000 08:01 43   /usr/lib/libc.so.6\n")
    assert nccl_direct.find_library(maps) == "/a b/libnccl.so.2"


def test_times_are_those_of_the_slowest_rank_and_errors_those_of_all() -> None:
    outcomes = [
        {"version": "2.28.9", "default": {"send 64": 5.0, "host send 64": 2.0}, "zero-CTA": {}},
        {"version": "2.28.9", "default": {"send 64": 7.0, "host send 64": 1.0}, "zero-CTA": {"failed": "no window"}},
    ]
    merged = nccl_direct.merge(outcomes)
    assert merged["version"] == "2.28.9"
    assert merged["default"] == {"send 64": 7.0, "host send 64": 2.0}
    assert merged["failed"] == "zero-CTA, rank 1: no window"
    assert "failed" not in nccl_direct.merge(outcomes[:1])
    assert nccl_direct.merge(["killed"])["failed"] == "rank 0: killed"


SIZE = 1 << 20


def measured() -> list[gpu_page.Line]:
    chains = {
        f"hoccl_jax all_gather {SIZE}": {"us": 20.0, "host_us": 9.5},
        f"jax.lax all_gather {SIZE}": {"us": 30.0},
        f"hoccl_jax broadcast {SIZE}": {"failed": "no such thing"},
    }
    nccl = {"default": {f"all_gather {SIZE}": 25.0, f"host all_gather {SIZE}": 24.0}, "zero-CTA": {f"all_gather {SIZE}": 40.0}}
    assert gpu_page.failures(chains, {**nccl, "failed": "no window"}) == [
        (f"hoccl_jax broadcast {SIZE}", "no such thing"),
        ("NCCL direct", "no window"),
    ]
    return gpu_page.lines(chains, nccl, {f"both ways {SIZE}": 10.0}, [4096, SIZE], 2)


def test_a_table_sets_all_beside_hoccl_jax() -> None:
    lines = measured()
    assert [(line.operation, line.size, line.moved) for line in lines] == [("all_gather", SIZE, SIZE)]
    (row,) = [line for line in gpu_page.tables("one process", lines).splitlines() if line.startswith("| 1 MiB")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:10] == ["1 MiB", "20.0", "52", "30.0", "1.50x", "25.0 (host)", "1.25x", "40.0", "2.00x", "0.50"]
    assert cells[11] == "9.5"
    assert gpu_page.text(lines[0]) == "all_gather 1 MiB: hoccl 20.0, lax 30.0 (1.50x), NCCL 25.0 (1.25x), zero-CTA 40.0, copy 0.50"


def test_a_page_has_failures_on_one_line() -> None:
    text = gpu_page.page("2 GPUs", ["today"], "picture.png", {"one process": measured(), "more": []}, [("x", "two\nlines | more", "")])
    assert "(picture.png)" in text
    assert "## One process\n" in text
    assert "## More" not in text
    assert text.endswith("| x | two lines / more |  |\n")


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_send_and_a_broadcast_leave_one_gpu(gpus: int) -> None:
    assert gpu_page.moved("send", SIZE, gpus) == SIZE
    assert gpu_page.moved("broadcast", SIZE, gpus) == (gpus - 1) * SIZE
    assert gpu_page.copy_name("send", SIZE, gpus) == f"one way {SIZE}"
    assert gpu_page.copied([SIZE], 2) == [SIZE // 2, SIZE]


def test_the_plot_is_drawn_from_the_numbers_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import gpu_plots

    line = {"operation": "send", "size": SIZE, "moved": SIZE, "hoccl": 10.0, "lax": None, "nccl": 12.0, "zero_cta": None, "copy": 8.0}
    assert gpu_plots.curve([line], "hoccl") == ([SIZE], [pytest.approx(104.8576)])
    assert gpu_plots.curve([line], "lax") == ([], [])
    file, out = tmp_path / "page.json", tmp_path / "out"
    out.mkdir()
    file.write_text(json.dumps({"picture": "h200x2-bandwidth.png", "forms": {"one process": [line], "more": []}}))
    monkeypatch.setenv("OUT", str(out))
    gpu_plots.main(["", str(file)])
    for folder in (tmp_path, out):
        assert (folder / "h200x2-bandwidth.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing was measured"):
        gpu_plots.draw({}, tmp_path / "none.png")


@pytest.mark.parametrize("columns", [3, 8191, 9000])
def test_data_of_gpu_programs_are_consecutive_numbers(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(gpu_programs, "PLATFORM", "cpu")
    rows = 3 * gpu_programs.gpu_mesh().size
    expected = (np.arange(rows * columns) % 8191).reshape(rows, columns)
    np.testing.assert_array_equal(gpu_programs.spread(3, columns), expected.astype(np.float32))
