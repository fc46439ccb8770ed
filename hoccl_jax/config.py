"""Every setting of hoccl_jax: one typed field each, set by its HOCCL_* environment variable. docs/settings.md is made from it."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered not in _TRUE + _FALSE:
        raise ValueError("a boolean: 1, true, yes, on, or 0, false, no, off")
    return lowered in _TRUE


def _integer(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise ValueError(f"an integer from {minimum} to {maximum}")
        return value

    return parse


def _positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-3 <= value <= 1e9:
        raise ValueError("a number of seconds from 0.001 to 1e9")
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return text.strip().lower()

    return parse


def _word(text: str) -> str:
    if any(character.isspace() for character in text):
        raise ValueError("a text without spaces")
    return text


def _ports(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        ports = (int(low), int(high or low))
    except ValueError:
        ports = (-1, -1)
    if not 0 <= ports[0] <= ports[1] <= 65535 or (ports[0] == 0 and ports[1] > 0):
        raise ValueError("a port or a range of ports, as in 40000-40099")
    return ports


def _chunk(text: str) -> int:
    value = _integer(4096, 1 << 30)(text)
    if value % 4096:
        raise ValueError("a multiple of 4096, up to 1 GiB")
    return value


def _setting(variable: str, default: Any, parse: Callable[[str], Any], doc: str) -> Any:
    """A field with its variable, its parser (whose ValueError says what the variable wants) and its line in docs/settings.md."""
    return dataclasses.field(default=default, metadata={"variable": variable, "parse": parse, "doc": doc})


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of this process. The engine's are read when it starts, `disable` and `overlap` at each call, `override_lax` at import."""

    timeout_s: float = _setting(
        "HOCCL_TIMEOUT_S",
        300.0,
        _positive_seconds,
        "Seconds after which anything that waits (for a peer's operation, for a process to start) becomes an error that says for whom.",
    )
    disable: bool = _setting("HOCCL_DISABLE", False, _boolean, "Run every function as its `jax.lax` twin.")
    overlap: bool = _setting(
        "HOCCL_OVERLAP",
        True,
        _boolean,
        "On GPUs, run operations on streams beside the program's, where their `overlap` argument does not say.",
    )
    override_lax: bool = _setting(
        "HOCCL_OVERRIDE_LAX", False, _boolean, "Run the collectives of `jax.lax` on hoccl_jax too, as under `hoccl_jax.override_lax()`."
    )
    copy_threads: int = _setting(
        "HOCCL_COPY_THREADS",
        0,
        _integer(0, 1024),
        "Threads that copy for CPU devices; 0: one for each core this process may use, at most 8.",
    )
    chunk_bytes: int = _setting(
        "HOCCL_CHUNK_BYTES", 256 << 10, _integer(1, 1 << 40), "Bytes that a copy engine moves before other transfers may come in between."
    )
    inline_bytes: int = _setting(
        "HOCCL_INLINE_BYTES",
        256 << 10,
        _integer(0, 1 << 40),
        "The thread that posts an operation does copies of at most so many bytes itself, four times as many together.",
    )
    posted_bytes: int = _setting(
        "HOCCL_POSTED_BYTES",
        4 << 10,
        _integer(0, 64 << 10),
        "What an operation on CPU devices has for another process of the host goes there with its announcement if it is at most so many "
        "bytes, and is read by the receiver if it is more.",
    )
    background_patience_ms: int = _setting(
        "HOCCL_BACKGROUND_PATIENCE_MS",
        5,
        _integer(1, 3_600_000),
        "Milliseconds that foreground traffic can keep a background transfer from going on; then one chunk of it moves.",
    )
    cross_memory: Literal["auto", "on", "off"] = _setting(
        "HOCCL_CROSS_MEMORY",
        "auto",
        _one_of("auto", "on", "off"),
        "Read the memory of the host's other processes directly (process_vm_readv): `auto` where the kernel allows it, `on` raises an "
        "error where not, `off` goes through shared memory.",
    )
    huge_pages: bool = _setting("HOCCL_HUGE_PAGES", True, _boolean, "Ask the kernel for huge pages under large results on CPU devices.")
    dma_chunk_bytes: int = _setting(
        "HOCCL_DMA_CHUNK_BYTES",
        8 << 20,
        _integer(1, 1 << 40),
        "On GPUs, bytes of a background transfer that a copy engine moves before a foreground transfer may come in between.",
    )
    in_stream_bytes: int = _setting(
        "HOCCL_IN_STREAM_BYTES",
        1 << 40,
        _integer(0, 1 << 40),
        "On GPUs, foreground transfers of at most so many bytes whose receiver has posted, of operations with overlap=False, run in the "
        "sender's own stream; others through the proxy.",
    )
    patience_us: int = _setting(
        "HOCCL_PATIENCE_US",
        10,
        _integer(0, 1_000_000),
        "On GPUs, how long a foreground operation looks out for its receivers' posts before it leaves the transfer to the proxy.",
    )
    trace: str = _setting(
        "HOCCL_TRACE",
        "",
        str,
        "A file that gets a trace of the engine, from its start to `shutdown` (which runs at exit); as `hoccl_jax.trace`. Empty: none.",
    )
    log_level: str = _setting(
        "HOCCL_LOG_LEVEL", "warning", _one_of("debug", "info", "warning", "error", "critical"), "Level of the Python logger `hoccl_jax`."
    )
    schedule: Literal["auto", "plan", "direct"] = _setting(
        "HOCCL_SCHEDULE",
        "auto",
        _one_of("auto", "plan", "direct"),
        "How operations between CPU devices of several nodes run: `plan` by a plan of the scheduler, `direct` each flow by itself, `auto` "
        "by a plan from 1 MiB a rank on, between hosts only what several devices of a host want. Between CUDA devices of several hosts all "
        "but `direct` forward within a host what several of its devices want. Alike in all processes.",
    )
    node_id: str = _setting(
        "HOCCL_NODE_ID",
        "",
        _word,
        "Processes with the same text count as one node, so that one host can play several; empty: a node is a host.",
    )

    heartbeat_timeout_s: float = _setting(
        "HOCCL_HEARTBEAT_TIMEOUT_S",
        30.0,
        _positive_seconds,
        "Seconds after which a process of another host that is not heard of is given up, and operations with it become errors. Connections "
        "outlast shorter interruptions; TCP may take as long again to notice that the network is back.",
    )
    net_provider: str = _setting(
        "HOCCL_NET_PROVIDER",
        "tcp",
        _word,
        "libfabric's provider for data between hosts: `tcp`, or for instance `verbs;ofi_rxm` or `efa`. Its own settings are `FI_*`.",
    )
    net_interface: str = _setting(
        "HOCCL_NET_INTERFACE",
        "",
        _word,
        "Name or address of the network interface to listen on for other hosts; empty: that which leads to the coordinator of "
        "`jax.distributed`.",
    )
    net_ports: tuple[int, int] = _setting(
        "HOCCL_NET_PORTS",
        (0, 0),
        _ports,
        "Port, or range of ports (`40000-40099`), for control connections from other hosts; 0: any. Those for data are libfabric's "
        "(`FI_TCP_PORT_LOW_RANGE`, `FI_TCP_PORT_HIGH_RANGE`).",
    )
    net_lanes: int = _setting("HOCCL_NET_LANES", 2, _integer(1, 16), "Connections that carry data to each process of another host.")
    net_chunk_bytes: int = _setting(
        "HOCCL_NET_CHUNK_BYTES", 1 << 20, _chunk, "Bytes of one write to another host, and of a staging buffer. The same in all processes."
    )
    net_in_flight: int = _setting(
        "HOCCL_NET_IN_FLIGHT", 8, _integer(1, 128), "Writes to each process of another host that are on their way at a time."
    )
    net_posted_bytes: int = _setting(
        "HOCCL_NET_POSTED_BYTES",
        4 << 20,
        _integer(0, 64 << 20),
        "What an operation has for a process of another host goes there with its announcement if it is at most so many bytes, and is "
        "fetched by the receiver if it is more.",
    )
    net_staging: Literal["auto", "on"] = _setting(
        "HOCCL_NET_STAGING",
        "auto",
        _one_of("auto", "on"),
        "Send through staging buffers: `auto` where the network can't reach the program's buffers cheaply, `on` always.",
    )
    net_between: Literal["hosts", "nodes"] = _setting(
        "HOCCL_NET_BETWEEN",
        "hosts",
        _one_of("hosts", "nodes"),
        "Use the network between different `hosts`, or between different `nodes` (HOCCL_NODE_ID) of one host too, as if they were apart.",
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Reads the settings from `environ` (default: the process's environment).

        Raises ValueError naming the variable, what it holds and what it wants.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            variable = field.metadata["variable"]
            if variable not in environ:
                continue
            try:
                values[field.name] = field.metadata["parse"](environ[variable])
            except ValueError as error:
                raise ValueError(f"{variable}={environ[variable]!r}: wanted {error}") from None
        return cls(**values)


_PREFIX = "HOCCL_"
_LAUNCHER = "HOCCL_LAUNCH_"  # variables by which hoccl_jax.tools.launch tells its processes who they are


def misspelt(environ: Mapping[str, str] | None = None) -> list[str]:
    """A line for each variable in `environ` (default: the process's environment) that looks like a setting and is none."""
    environ = os.environ if environ is None else environ
    known = [field.metadata["variable"] for field in dataclasses.fields(Config)]
    lines = []
    for variable in sorted(environ):
        if variable.startswith(_PREFIX) and not variable.startswith(_LAUNCHER) and variable not in known:
            meant = difflib.get_close_matches(variable, known, n=1)
            lines.append(f"{variable} is no setting of hoccl_jax" + "".join(f"; {name} is one" for name in meant))
    return lines


def settings_page() -> str:
    """The text of docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Environment variables that hoccl_jax reads. This page is `hoccl_jax.config.settings_page()`; a test keeps it up to date.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for field in dataclasses.fields(Config):
        default = int(field.default) if isinstance(field.default, bool) else field.default
        default = default[0] if isinstance(default, tuple) else default
        shown = f"`{default:g}`" if isinstance(default, float) else f"`{default}`" if default != "" else "(empty)"
        lines.append(f"| `{field.metadata['variable']}` | {shown} | {field.metadata['doc']} |")
    return "\n".join(lines) + "\n"
