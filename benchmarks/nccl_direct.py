"""NCCL called directly, through ctypes: what jax.lax's collectives could take at best, and NCCL's own way without SMs.

`measure` does it for the GPUs of this process, which with those of the job's other processes make one communicator. Two forms: as NCCL is
by default, and with its zero-CTA policy and buffers in symmetric windows, where all_gather and all_to_all run on copy engines (the others
have no such form in NCCL and run kernels on the registered buffers).
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import pathlib
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import peer_copy

OPERATIONS = ("ppermute", "send", "all_to_all", "all_gather", "broadcast")
FORMS = ("default", "zero-CTA")

_UNDEFINED = -(1 << 31)  # a number that the caller leaves to NCCL
_BYTE = 1  # ncclUint8
_ZERO_CTA = 2
_SYMMETRIC = 1
_FENCE_BYTES = 4096
_HANGING_BROADCAST = 8 << 20


class Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.28. Later versions add fields behind these and take their defaults from `size`."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
        ("collnet_enable", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
        ("channels_per_net_peer", ctypes.c_int),
        ("nvlink_centric_sched", ctypes.c_int),
    ]

    @classmethod
    def with_policy(cls, cta_policy: int = _UNDEFINED) -> Config:
        config = cls(size=ctypes.sizeof(cls), magic=0xCAFEBEEF, version=22800)
        for name, *kind in cls._fields_:
            if kind == [ctypes.c_int]:
                setattr(config, name, _UNDEFINED)
        config.cta_policy = cta_policy
        return config


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_TYPES: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_INT)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRankConfig": [ctypes.POINTER(_POINTER), _INT, UniqueId, _INT, ctypes.POINTER(Config)],
    "ncclMemAlloc": [ctypes.POINTER(_POINTER), _SIZE],
    "ncclCommWindowRegister": [_POINTER, _POINTER, _SIZE, ctypes.POINTER(_POINTER), _INT],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllGather": [_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER],
    "ncclAlltoAll": [_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclSend": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclRecv": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
}


def find_library(maps: pathlib.Path = pathlib.Path("/proc/self/maps")) -> str:
    """The NCCL that this process has loaded, else the one that came with JAX or PyTorch, else the system's."""
    for line in maps.read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if pathlib.Path(path).name.startswith("libnccl.so"):
            return path
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages.submodule_search_locations if packages else None) or []:
        for file in sorted(pathlib.Path(folder).glob("*/lib/libnccl.so.2")):
            return str(file)
    return "libnccl.so.2"


class Library:
    """NCCL's functions. Errors are RuntimeError with the function's name and NCCL's own words."""

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclGetLastError.restype = ctypes.c_char_p
        self._library.ncclGetLastError.argtypes = [_POINTER]
        self._functions: dict[str, Any] = {}
        for name, types in _TYPES.items():
            if function := getattr(self._library, name, None):
                function.argtypes, function.restype = types, _INT
                self._functions[name] = function

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def __call__(self, name: str, *arguments: Any) -> None:
        if name not in self:
            raise RuntimeError(f"{name}: this NCCL has none")
        self._check(name, self._functions[name](*arguments))

    def _check(self, name: str, result: int) -> None:
        if result:
            words = [self._library.ncclGetErrorString(result), self._library.ncclGetLastError(None)]
            raise RuntimeError(f"{name}: {'; '.join(text.decode(errors='replace') for text in words if text)}")

    def leave_group(self) -> None:
        """After an error: what comes next must not be part of a group that was left open."""
        self._functions["ncclGroupEnd"]()

    def version(self) -> str:
        code = ctypes.c_int()
        self("ncclGetVersion", ctypes.byref(code))
        return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"

    def bind(self, calls: Sequence[tuple[Any, ...]]) -> Callable[[], None]:
        """What makes the calls, (name, arguments...) each, with as little of Python as possible."""
        bound = [(self._functions[name], arguments, name) for name, *arguments in calls]

        def run() -> None:
            for function, arguments, name in bound:
                if result := function(*arguments):
                    self._check(name, result)

        return run


@dataclasses.dataclass(frozen=True)
class Rank:
    """A GPU of this process as a member of the communicator."""

    number: int
    gpu: peer_copy.Gpu
    comm: ctypes.c_void_p
    operand: ctypes.c_void_p
    result: ctypes.c_void_p


def calls(operation: str, rank: Rank, world: int, size: int, alltoall: bool) -> list[tuple[Any, ...]]:
    """What a rank calls for one operation on an operand of `size` bytes: (name, arguments...) each. `alltoall`: NCCL has ncclAlltoAll."""
    where = (_BYTE, rank.comm, rank.gpu.stream)
    if operation == "all_gather":
        return [("ncclAllGather", rank.operand, rank.result, size, *where)]
    if operation == "broadcast":
        return [("ncclBroadcast", rank.operand, rank.result, size, _BYTE, 0, rank.comm, rank.gpu.stream)]
    if operation == "all_to_all":
        part = size // world
        if alltoall:
            return [("ncclAlltoAll", rank.operand, rank.result, part, *where)]
        pairs = [(s, d) for s in range(world) for d in range(world)]
    elif operation == "ppermute":
        part, pairs = size, [(r, (r + 1) % world) for r in range(world)]
    elif operation == "send":
        part, pairs = size, [(0, 1)]
    else:
        raise ValueError(f"unknown operation {operation!r}")
    found: list[tuple[Any, ...]] = []
    for source, destination in pairs:
        sent, received = (peer * part if operation == "all_to_all" else 0 for peer in (destination, source))
        if source == rank.number:
            found.append(("ncclSend", _at(rank.operand, sent), part, _BYTE, destination, rank.comm, rank.gpu.stream))
        if destination == rank.number:
            found.append(("ncclRecv", _at(rank.result, received), part, _BYTE, source, rank.comm, rank.gpu.stream))
    return found


def _at(pointer: ctypes.c_void_p, offset: int) -> ctypes.c_void_p:
    return ctypes.c_void_p((pointer.value or 0) + offset)


def grouped(all_calls: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Calls that are one operation to NCCL; a single one needs no group."""
    return list(all_calls) if len(all_calls) < 2 else [("ncclGroupStart",), *all_calls, ("ncclGroupEnd",)]


def _unique_id(library: Library, first: bool, everyone: Callable[[str], list[str]]) -> UniqueId:
    """The one that the first rank's process makes. Its failure is everyone's, so that nobody waits for it."""
    text = ""
    if first:
        try:
            unique = UniqueId()
            library("ncclGetUniqueId", ctypes.byref(unique))
            text = bytes(unique).hex()
        except RuntimeError as error:
            text = f"rank 0: {error}"
    text = everyone(text)[0]
    if text.startswith("rank 0:"):
        raise RuntimeError(text)
    return UniqueId.from_buffer_copy(bytes.fromhex(text))


def _communicators(library: Library, gpus: dict[int, peer_copy.Gpu], world: int, unique: UniqueId, policy: int) -> dict[int, Any]:
    comms = {number: ctypes.c_void_p() for number in gpus}
    config = Config.with_policy(policy)
    library("ncclGroupStart")
    for number, gpu in gpus.items():
        gpu.use()
        library("ncclCommInitRankConfig", ctypes.byref(comms[number]), world, unique, number, ctypes.byref(config))
    library("ncclGroupEnd")
    return comms


def _windows(library: Library, gpus: dict[int, peer_copy.Gpu], comms: dict[int, Any], sizes: Sequence[int]) -> dict[int, list[Any]]:
    """Buffers of `sizes` bytes for each rank, in symmetric windows."""
    buffers: dict[int, list[ctypes.c_void_p]] = {}
    for number, gpu in gpus.items():
        gpu.use()
        buffers[number] = [ctypes.c_void_p() for _ in sizes]
        for buffer, size in zip(buffers[number], sizes, strict=True):
            library("ncclMemAlloc", ctypes.byref(buffer), size)
    windows = []
    library("ncclGroupStart")
    for number, gpu in gpus.items():
        gpu.use()
        for buffer, size in zip(buffers[number], sizes, strict=True):
            windows.append(ctypes.c_void_p())
            library("ncclCommWindowRegister", comms[number], buffer, size, ctypes.byref(windows[-1]), _SYMMETRIC)
    library("ncclGroupEnd")
    if not all(window.value for window in windows):
        raise RuntimeError("ncclCommWindowRegister gave no window: NCCL has no symmetric memory on these GPUs")
    return buffers


def _time(library: Library, ranks: Sequence[Rank], world: int, operation: str, size: int, repeats: int) -> tuple[float, float]:
    """us of one of many operations in a row, the slowest GPU's, and us that one takes this thread to enqueue."""

    def bound(name: str, count: int) -> Callable[[], None]:
        return library.bind(grouped([call for rank in ranks for call in calls(name, rank, world, count, "ncclAlltoAll" in library)]))

    times = 100 if size < 256 << 20 else 10
    step, fence = bound(operation, size), bound("all_gather", _FENCE_BYTES)
    measured = []
    for _ in range(1 + repeats):  # the first one connects the ranks
        fence()  # no GPU's time begins before all have come here
        for rank in ranks:
            rank.gpu.begin()
        start = time.perf_counter()
        for _ in range(times):
            step()
        host = (time.perf_counter() - start) * 1e6
        for rank in ranks:
            rank.gpu.finish()
        measured.append((max(rank.gpu.elapsed_us() for rank in ranks) / times, host / times))
    us, host_us = zip(*measured[1:], strict=True)
    return statistics.median(us), statistics.median(host_us)


def left_out(form: str, operation: str, size: int) -> bool:
    """Broadcasts of 8 MiB and more under the zero-CTA policy: they hung on two H200s with NCCL 2.28.9, and a hang ends all measuring."""
    return form == "zero-CTA" and operation == "broadcast" and size >= _HANGING_BROADCAST


def measure(
    sizes: Sequence[int],
    ordinals: dict[int, int],
    world: int,
    everyone: Callable[[str], list[str]],
    found: dict[str, Any],
    after_form: Callable[[], None],
    repeats: int = 7,
) -> None:
    """Fills `found` while it goes: the version, and for each form {"<operation> <bytes of a rank's operand>": us}.

    Further keys of a form: "host <operation> <bytes>", us that this thread takes to enqueue one, and "failed" with an error's text.

    Args:
      sizes: bytes.
      ordinals: the CUDA device of each rank of this process.
      world: how many ranks all processes have together.
      everyone: what each process brings, in order of the processes.
      found: see above.
      after_form: called after each form.
      repeats: medians are of so many.
    """
    library = Library(find_library())
    found["version"] = library.version()
    driver = peer_copy.Driver()
    of_operand, of_result = max(*sizes, _FENCE_BYTES), world * max(*sizes, _FENCE_BYTES)
    for form in FORMS:
        times: dict[str, Any] = found.setdefault(form, {})
        try:
            unique = _unique_id(library, 0 in ordinals, everyone)
            windows = form == "zero-CTA"
            own = () if windows else (of_operand, of_result)
            gpus = {number: peer_copy.Gpu(driver, ordinal, *own) for number, ordinal in ordinals.items()}
            comms = _communicators(library, gpus, world, unique, _ZERO_CTA if windows else _UNDEFINED)
            if windows:
                buffers = _windows(library, gpus, comms, (of_operand, of_result))
            else:
                buffers = {number: [ctypes.c_void_p(buffer.value) for buffer in gpu.buffers] for number, gpu in gpus.items()}
            ranks = [Rank(number, gpu, comms[number], *buffers[number]) for number, gpu in gpus.items()]
            for operation in OPERATIONS:
                for size in sizes:
                    if left_out(form, operation, size):
                        continue
                    key = f"{operation} {size}"
                    times[key], times[f"host {key}"] = _time(library, ranks, world, operation, size, repeats)
        except Exception:
            times["failed"] = traceback.format_exc()[-1500:]
            library.leave_group()
        after_form()


def merge(outcomes: Sequence[Any]) -> dict[str, Any]:
    """What all ranks found: the slowest one's times, and the errors of all. Outcomes that are no dictionaries are errors' texts."""
    merged: dict[str, Any] = {form: {} for form in FORMS}
    failed = {f"rank {rank}: {outcome}"[:2000] for rank, outcome in enumerate(outcomes) if not isinstance(outcome, dict)}
    for rank, outcome in enumerate(outcomes):
        for form, times in outcome.items() if isinstance(outcome, dict) else ():
            if form == "version":
                merged["version"] = times
            elif form == "failed":
                failed.add(f"rank {rank}: {times}")
            else:
                for key, us in times.items():
                    if key == "failed":
                        failed.add(f"{form}, rank {rank}: {us}")
                    else:
                        merged[form][key] = max(us, merged[form].get(key, 0.0))
    if failed:
        merged["failed"] = "; ".join(sorted(failed))
    return merged
