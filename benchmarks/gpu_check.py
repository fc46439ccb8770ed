"""Builds, tests and measures on the GPUs of this machine, in one call, and prints a short table last.

    python -m benchmarks.gpu_check                one GPU, shared by two processes, under MPS where something is timed
    python -m benchmarks.gpu_check --network      the same, and only the network connects the processes
    python -m benchmarks.gpu_check --gpus 2       several GPUs: bandwidth, latency, interference and end to end, beside jax.lax (NCCL) and
                                                  the simulator's prediction; 4, 6, 8 ... of them also as two nodes

The page docs/results/<--page>.md is written with the date, the driver and the versions; for several GPUs also <--page>.json, whose numbers
benchmarks/gpu_plots.py draws. --nobuild takes the extension and the C++ tests as they are (--tests names the folder of the latter).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

from benchmarks import gpu_page, gpu_training_rows, nccl_direct
from hoccl_jax.tools import launch

FLAGS = flags.FLAGS
flags.DEFINE_integer("gpus", 1, "Measure so many GPUs of this machine beside jax.lax, instead of checking one.", lower_bound=1)
flags.DEFINE_bool("network", False, "Check two processes of one GPU that only the network connects.")
flags.DEFINE_bool("build", True, "Build the extension in place and the C++ tests first.")
flags.DEFINE_string("tests", "build/gpu/tests", "Folder of the C++ tests.")
flags.DEFINE_bool("dryrun", False, "On CPU devices with small sizes: shows that the script works, measures nothing, writes no page.")
flags.DEFINE_string("page", None, "Name of the page in docs/results (default: h200-<date>, h200-network-<date> or h200x<gpus>-<date>).")
flags.DEFINE_float(
    "time_limit", None, "Seconds from the start after which no part is started; the page says which are missing.", lower_bound=0
)
flags.DEFINE_float("seconds", 60, "How long the random operations run, for each form of memory.", lower_bound=1)

_ROOT = pathlib.Path(__file__).parents[1]
_LIBRARIES = ["hoccl_jax", "jax.lax"]
_GIB = 1 << 30
_LARGE = 256 << 20

_DRY: dict[str, Any] = {
    "sizes": [65536],
    "steps": 3,
    "repeats": 3,
    "size": 64,
    "moved": 1 << 20,
    "rows": 16,
    "seconds": 2,
    "count": 6,
    "width": 64,
    "layers": 4,
    "sequence": 32,
    "chain": 5,
}

# The processes of a job are two nodes, which only the network connects.
_NODES = {"GPU_WORKER_NODES": "2", "HOCCL_NET_BETWEEN": "nodes"}
# NCCL by copy engines: XLA gives it registered memory, and the policy leaves it no SMs.
_ZERO_CTA = {"XLA_FLAGS": "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true", "NCCL_CTA_POLICY": "2"}

# Without it XLA refuses jax.lax.ragged_all_to_all between processes, where it has nothing better than NCCL's sends and receives. It came
# with jax 0.11; older ones end at a flag that they do not know.
_RAGGED = {"XLA_FLAGS": "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true"}

# NCCL called directly, and bare copies, allocate memory beside JAX.
_BARE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

_STARTED = time.monotonic()

Row = tuple[str, str, str]  # what, result, wanted


def _left() -> float:
    """Seconds until --time_limit."""
    return math.inf if FLAGS.time_limit is None else _STARTED + FLAGS.time_limit - time.monotonic()


def _build() -> None:
    tests = _ROOT / "build" / "gpu"
    configure = ["cmake", "-S", str(_ROOT), "-B", str(tests), "-G", "Ninja", "-DHOCCL_INPLACE=ON", "-DHOCCL_BUILD_TESTS=ON"]
    subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", str(tests)], check=True, stdout=subprocess.DEVNULL)


@dataclasses.dataclass(frozen=True)
class _Job:
    """Processes, and the GPUs that are dealt to them."""

    processes: int
    gpus: tuple[str, ...] | None = None


_SHARED = _Job(2, ("0",))
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def _run(task: str, arguments: dict[str, Any], job: _Job, env: dict[str, str]) -> list[Any]:
    """What each rank of a job returns for a task of gpu_worker; its error as text where it failed."""
    environment = {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(_ROOT), **env}
    if FLAGS.dryrun:
        environment |= {
            "GPU_WORKER_PLATFORM": "cpu",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(max(2, FLAGS.gpus) // job.processes),
        }
        arguments = arguments | {k: v for k, v in _DRY.items() if k in arguments}
    program = ["-m", "benchmarks.gpu_worker", task, json.dumps(arguments)]
    start = time.monotonic()
    left = _left()
    if left < 15:
        return ["left out: --time_limit is over"]
    try:
        gpus = None if FLAGS.dryrun else job.gpus
        results = launch.run(program, processes=job.processes, gpus=gpus, env=environment, timeout=min(400, left))
    except launch.LaunchError as error:
        return [_partial(result.output, f"failed: {str(error)[-2000:]}") for result in error.results] or [f"failed: {error}"]
    finally:
        print(f"{task} {arguments} {env}: {time.monotonic() - start:.0f} s", flush=True)
    outcomes: list[Any] = []
    for result in results:
        lines = [line for line in result.output.splitlines() if line.startswith("RESULT ")]
        outcomes.append(json.loads(lines[-1][len("RESULT ") :]) if lines else f"failed: no result in {result.output[-2000:]}")
    print(json.dumps(outcomes[0])[:3000], flush=True)
    return outcomes


def _partial(output: str, failed: str) -> Any:
    """What a failed process had found until then, where it said so, and in any case the failure."""
    lines = [line for line in output.splitlines() if line.startswith("PARTIAL ")]
    return {**json.loads(lines[-1][len("PARTIAL ") :]), "failed": failed} if lines else failed


def _cpp_test(test: pathlib.Path, connections: str) -> tuple[int, list[str]]:
    """How many of a program's tests passed, and the names of those that failed."""
    env = {**os.environ, "HOCCL_TEST_CUDA_DRIVER": "libcuda.so.1"}
    env.pop(_CONNECTIONS, None)  # importing hoccl_jax has set it here
    if "network" in test.name:  # up to six ranks in one context, whose waits need queues of their own
        connections = connections or "32"
    if connections:
        env[_CONNECTIONS] = connections
    start = time.monotonic()
    limit = min(300, _left())
    if limit < 5:
        return 0, [f"{test.name}: left out: --time_limit is over"]
    try:
        output = subprocess.run([test], env=env, capture_output=True, text=True, timeout=limit).stdout
    except subprocess.TimeoutExpired as hung:
        output = (hung.stdout or b"").decode() + f"\n[  FAILED  ] {test.name}. did not end in {limit:.0f} s"
    print(f"{test.name} {connections}: {time.monotonic() - start:.1f} s", flush=True)
    failed = {line[13:].split(" (")[0] for line in output.splitlines() if line.startswith("[  FAILED  ]") and "." in line}
    return output.count("[       OK ]"), sorted(failed)


def _cpp_tests(pattern: str = "cuda_*_test", all_connections: Sequence[str] = ("", "1", "32")) -> list[Row]:
    """The C++ tests of the CUDA layer, on the machine's driver, eight programs at a time: most of their time goes into contexts."""
    rows = []
    tests = sorted(pathlib.Path(FLAGS.tests).glob(pattern))
    for connections in all_connections:
        # Others put two ranks into one context, whose single hardware queue would hold one's flag behind the other's wait.
        chosen = [test for test in tests if not connections or "hazard" in test.name]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(_cpp_test, chosen, [connections] * len(chosen)))
        passed, failed = sum(outcome[0] for outcome in outcomes), [name for outcome in outcomes for name in outcome[1]]
        what = f"C++ tests on the driver, {_CONNECTIONS} {connections or 'unset'}"
        rows.append((what, f"{passed} passed" + (f"; failed: {', '.join(failed)}" if failed else ""), "all"))
    return rows


def _equivalence(row: str, outcome: list[Any]) -> Row:
    if broken := [rank for rank in outcome if isinstance(rank, str)]:
        return (row, broken[0], "all equal")
    failed = {name: text for rank in outcome for name, text in rank["failed"].items()}
    text = f"{outcome[0]['ran']} cases equal" if not failed else f"{len(failed)} of {outcome[0]['ran']} differ: {json.dumps(failed)[:1500]}"
    return (row, text, "all equal")


def _messages(form: str, outcome: list[Any]) -> Row:
    found = [rank if isinstance(rank, str) else {name: rank[name] for name in ("rounds", "wrong")} for rank in outcome]
    return (f"messages between programs, {form}", json.dumps(found), "none wrong")


def _random_operations(form: str, seed: int, env: dict[str, str]) -> Row:
    outcome = _run("random_operations", {"seconds": FLAGS.seconds, "seed": seed}, _SHARED, env)
    counts = [{k: v for k, v in rank.items() if k != "stats"} if isinstance(rank, dict) else rank for rank in outcome]
    return (f"random operations for {FLAGS.seconds:g} s, {form}", json.dumps(counts), "no mismatch")


@contextlib.contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """NVIDIA's multi-process service, and the environment of its clients. Without it processes of a GPU take turns of a millisecond."""
    control = shutil.which("nvidia-cuda-mps-control", path=os.pathsep.join([os.environ["PATH"], "/usr/local/nvidia/bin"]))
    if FLAGS.dryrun or control is None:
        yield {}
        return
    folder = functools.partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)  # the service may still be ending
    with folder() as pipes, folder() as logs:
        # 8 queues: what hoccl_jax leaves it at under MPS, but it was imported here before the service was there.
        client = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": logs, _CONNECTIONS: "8"}
        subprocess.run([control, "-d"], env=os.environ | client, check=True, timeout=60)
        try:
            yield client
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):  # what was measured is worth more
                subprocess.run([control], env=os.environ | client, input="quit\n", text=True, check=False, timeout=60)


def _one() -> list[Row]:
    rows: list[Row] = []
    shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".3", "HOCCL_TIMEOUT_S": "60"}
    growing = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HOCCL_TIMEOUT_S": "60"}
    patient = {**shared, "HOCCL_PATIENCE_US": "20000"}  # so that calls with overlap=False push in their streams
    rows.append(_equivalence("cases, preallocated memory", _run("equivalence", {"seed": 11, "count": 150}, _SHARED, patient)))
    rows.append(_equivalence("cases, growing pool", _run("equivalence", {"seed": 12, "count": 150}, _SHARED, growing)))
    rows.append(_equivalence("reshardings and their gradients", _run("reshardings", {"seed": 0, "count": 30}, _SHARED, shared)))
    for name, env in (("preallocated memory", shared), ("growing pool", growing)):
        outcome = _run("mixture", {"tokens": 512, "width": 256, "steps": 5}, _SHARED, env)
        rows.append((f"mixture of experts against the dense model, {name}", json.dumps(outcome), "furthest below 1e-4"))
    rows.append(_messages("two processes of one GPU", _run("messages", {"rounds": 20}, _SHARED, shared)))
    for overlap in (True, False):
        profile = _run("profile", {"steps": 20, "overlap": overlap}, _SHARED, patient)[0]
        rows.append((f"20 all-gathers and 20 ppermutes with overlap={overlap} run as", json.dumps(profile), "no kernel"))
    with _mps() as together:
        form, wanted = "MPS" if together else "in turns", "12 us in the stream, 20 by the proxy; host 8 and 6 us"
        for name, env in (("in the stream", shared), ("by the proxy", {**shared, "HOCCL_IN_STREAM_BYTES": "0"})):
            chain = _run("chains", {"sizes": [65536], "steps": 100, "libraries": ["hoccl_jax"]}, _SHARED, env | together)[0]
            for operation, entry in chain.items() if isinstance(chain, dict) else [("failed", chain)]:
                rows.append((f"{operation}, {name}, {form}", json.dumps(entry), wanted))
        rows += gpu_training_rows.one(_run, _SHARED, shared | together)
    gemms = _run("interference", {"size": 8192, "count": 6, "moved": _GIB, "libraries": ["hoccl_jax"]}, _SHARED, shared)[0]
    rows.append(("GEMMs beside transfers on the same GPU, us", json.dumps(gemms), ""))
    for name, env in (("preallocated", shared), ("growing pool", growing)):
        rows.append(_random_operations(name, 5, env))
    return rows if FLAGS.dryrun else rows + _cpp_tests()


def _chain_entries(form: str, chain: Any) -> list[Row]:
    entries = chain if isinstance(chain, dict) else {"failed": chain}
    return [(f"{operation}, {form}", json.dumps(entry), "") for operation, entry in entries.items()]


def _network_chains(form: str, job: _Job, env: dict[str, str]) -> list[Row]:
    rows = []
    for sizes, steps in (([4096, 65536, 1 << 20], 50), ([64 << 20], 5)):
        chain = _run("chains", {"sizes": sizes, "steps": steps, "repeats": 7, "libraries": ["hoccl_jax"]}, job, env)[0]
        rows += _chain_entries(form, chain)
    return rows


def _network() -> list[Row]:
    rows: list[Row] = []
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".3", "HOCCL_TIMEOUT_S": "60", **_NODES}
    rows.append(_equivalence("cases, by the network", _run("equivalence", {"seed": 31, "count": 100}, _SHARED, env)))
    rows.append(_messages("by the network", _run("messages", {"rounds": 20}, _SHARED, env)))
    rows += _network_chains("by the network", _SHARED, env)
    profile = _run("profile", {"steps": 20, "overlap": True}, _SHARED, env)[0]
    rows.append(("20 all-gathers and 20 ppermutes run as", json.dumps(profile), "no kernel"))
    overlapped = _run("overlapped", {"size": 4096, "moved": 128 << 20}, _SHARED, env)[0]
    rows.append(("products and a ppermute of 128 MiB as one program", json.dumps(overlapped), "1.03 of the longer"))
    rows.append(_random_operations("by the network", 6, env))
    return rows if FLAGS.dryrun else rows + _cpp_tests("cuda_network_test", ("",))


def _collectives(
    form: str, job: _Job, env: dict[str, str], limits: dict[str, float], sizes: Sequence[int], measured: dict[str, Any]
) -> list[Row]:
    """hoccl_jax, jax.lax and NCCL directly, into `measured`; a row for each thing that failed."""
    # One process: what says most.
    operations = gpu_page.OPERATIONS if job.processes > 1 else ("ppermute", "all_to_all", "all_gather")
    chains: dict[str, Any] = {}
    of_chains = env | (_RAGGED if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) >= (0, 11) else {})
    for some, steps, repeats in (([size for size in sizes if size < _LARGE], 100, 9), ([size for size in sizes if size >= _LARGE], 15, 5)):
        arguments = {"sizes": some, "steps": steps, "repeats": repeats, "libraries": _LIBRARIES, "operations": operations}
        outcome = _run("chains", arguments, job, of_chains)[0]
        chains |= outcome if isinstance(outcome, dict) else {f"chains of {len(some)} sizes": {"failed": outcome}}
    nccl = nccl_direct.merge(_run("nccl", {"sizes": sizes}, job, env | _BARE))
    if "version" in nccl:
        measured["nccl"] = nccl["version"]
    measured["forms"][form] = gpu_page.lines(chains, nccl, limits, sizes, FLAGS.gpus)
    return [(f"{what}, {form}", error, "") for what, error in gpu_page.failures(chains, nccl)]


def _several(rows: list[Row], measured: dict[str, Any]) -> None:
    """Fills the rows, and `measured` with what gpu_page has tables for."""
    gpus = tuple(str(gpu) for gpu in range(FLAGS.gpus))
    apart, alone = _Job(FLAGS.gpus, gpus), _Job(1)
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".8", "HOCCL_TIMEOUT_S": "60", "JAX_CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    forms = (("a process a GPU", apart), ("one process", alone))
    sizes = _DRY["sizes"] if FLAGS.dryrun else [4096, 65536, 1 << 20, 8 << 20, 64 << 20, _LARGE, _GIB]
    limits = _run("limits", {"sizes": gpu_page.copied(sizes, FLAGS.gpus)}, alone, env | _BARE)[0]
    if isinstance(limits, str):
        rows.append(("bare copies", limits, ""))
        limits = {}
    for form, job in forms:
        rows += _collectives(form, job, env, limits, sizes, measured)
        both = _run("interference", {"size": 8192, "count": 6, "moved": 3 * _GIB, "libraries": _LIBRARIES}, job, env)[0]
        rows.append((f"GEMMs and a transfer, us, {form}", json.dumps(both), "hoccl_jax: +2 %"))
        for shape in ({"rows": 2048, "width": 8192}, {"rows": 4096, "width": 8192}, {"rows": 8192, "width": 8192}):
            forward = _run("gathered_forward", {**shape, "libraries": _LIBRARIES}, job, env)[0]
            rows.append((f"8 layers, weights gathered, {shape['rows']} rows a GPU, us, {form}", json.dumps(forward), ""))
        rows.append(_messages(form, _run("messages", {"rounds": 50}, job, env)))
        rows.append(_equivalence(f"cases, {form}", _run("equivalence", {"seed": 21, "count": 60}, job, env)))
        if job is apart:
            rows += gpu_training_rows.several(_run, apart, env, FLAGS.gpus)
    arguments = {"sizes": sizes, "steps": 100, "repeats": 5, "libraries": ["jax.lax"], "operations": ["all_to_all", "all_gather"]}
    zero = _run("chains", arguments | {"sizes": [size for size in sizes if size < _LARGE]}, apart, env | _ZERO_CTA)[0]
    rows.append(("jax.lax with NCCL's zero-CTA policy, us", json.dumps(zero)[:3000], ""))
    if FLAGS.gpus >= 4 and FLAGS.gpus % 2 == 0:
        rows += _two_nodes(apart, env)


def _two_nodes(job: _Job, env: dict[str, str]) -> list[Row]:
    """Two nodes of half of the GPUs each: what crosses takes the way through pinned memory and the network."""
    form, env = f"two nodes of {FLAGS.gpus // 2} GPUs", env | _NODES
    rows = [_equivalence(f"cases, {form}", _run("equivalence", {"seed": 41, "count": 60}, job, env))]
    return rows + _network_chains(form, job, env)


def _versions() -> str:
    import jax

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    return f"{datetime.date.today()}; {gpus}; Python {platform.python_version()}, jax {jax.__version__}"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no such arguments: {argv[1:]}")
    if FLAGS.gpus > 1 and FLAGS.network:
        raise app.UsageError("--network checks one GPU: leave --gpus out")
    os.chdir(_ROOT)
    if FLAGS.build:
        _build()
    measured: dict[str, Any] = {"gpus": FLAGS.gpus, "forms": {}}
    rows: list[Row] = []
    if FLAGS.gpus > 1:
        try:
            _several(rows, measured)
        except Exception:  # what was measured until then is worth its page
            rows.append(("the rest", f"failed: {traceback.format_exc()[-2000:]}", ""))
    else:
        rows = _network() if FLAGS.network else _one()
    short = [f"{gpu_page.text(line)}, {form}" for form, lines in measured["forms"].items() for line in lines if line.hoccl]
    if FLAGS.dryrun:
        print("\n".join(gpu_page.tables(form, lines) for form, lines in measured["forms"].items()))
        print("\n".join([*short, *(f"{what}: {result[:400]}" for what, result, _ in rows)]))
        return
    form, title, flag = ("h200", "One GPU, shared by two processes", "")
    if FLAGS.gpus > 1:
        form, title, flag = (f"h200x{FLAGS.gpus}", f"{FLAGS.gpus} GPUs", f" --gpus {FLAGS.gpus}")
    elif FLAGS.network:
        form, title, flag = ("h200-network", "One GPU, shared by two processes that only the network connects", " --network")
    name = FLAGS.page or f"{form}-{datetime.date.today()}"
    versions = _versions() + (f", NCCL {measured['nccl']}" if "nccl" in measured else "")
    head = [versions, f"`python -m benchmarks.gpu_check{flag}`; times are medians of programs that repeat the operation."]
    if FLAGS.gpus > 1:
        picture = f"{form}-bandwidth.png"
        lines = {form: [dataclasses.asdict(line) for line in lines] for form, lines in measured["forms"].items()}
        numbers = {"title": title, "versions": versions, **measured, "picture": picture, "forms": lines, "rows": rows}
        _save(f"{name}.json", json.dumps(numbers, indent=1) + "\n")
        _save(f"{name}.md", gpu_page.page(title, head, picture, measured["forms"], rows))
    else:
        _save(f"{name}.md", "\n\n".join([f"# {title}", *head, gpu_page.results(rows)]) + "\n")
    print(f"\n{name}.md: {versions}")
    print("\n".join([*short, *(f"{what}: {result[:200]}" for what, result, _ in rows)]))


def _save(name: str, text: str) -> None:
    """In docs/results, and in the folder OUT where that is set."""
    for folder in (str(_ROOT / "docs" / "results"), os.environ.get("OUT")):
        if folder:
            (pathlib.Path(folder) / name).write_text(text)


if __name__ == "__main__":
    app.run(main)
