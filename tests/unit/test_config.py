"""Settings: defaults, parsing, errors that name the variable, and the page that describes them."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

import hoccl_jax
from hoccl_jax.config import Config, misspelt, settings_page


def test_defaults_without_environment() -> None:
    assert Config.from_env({}) == Config()


def test_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCCL_TIMEOUT_S", "12.5")
    assert Config.from_env().timeout_s == 12.5


def test_every_field_is_read_from_its_variable() -> None:
    texts = {
        "HOCCL_TIMEOUT_S": ("7", 7.0),
        "HOCCL_DISABLE": ("on", True),
        "HOCCL_BACKGROUND_PATIENCE_MS": ("9", 9),
        "HOCCL_OVERLAP": ("0", False),
        "HOCCL_OVERRIDE_LAX": ("1", True),
        "HOCCL_COPY_THREADS": ("3", 3),
        "HOCCL_CHUNK_BYTES": ("4096", 4096),
        "HOCCL_INLINE_BYTES": ("0", 0),
        "HOCCL_POSTED_BYTES": ("0", 0),
        "HOCCL_CROSS_MEMORY": ("OFF", "off"),
        "HOCCL_HUGE_PAGES": ("no", False),
        "HOCCL_LOG_LEVEL": ("debug", "debug"),
        "HOCCL_NODE_ID": ("left", "left"),
        "HOCCL_SCHEDULE": ("Direct", "direct"),
        "HOCCL_TRACE": ("step.json", "step.json"),
        "HOCCL_DMA_CHUNK_BYTES": ("4096", 4096),
        "HOCCL_IN_STREAM_BYTES": ("0", 0),
        "HOCCL_PATIENCE_US": ("0", 0),
        "HOCCL_HEARTBEAT_TIMEOUT_S": ("2.5", 2.5),
        "HOCCL_NET_PROVIDER": ("verbs;ofi_rxm", "verbs;ofi_rxm"),
        "HOCCL_NET_INTERFACE": ("eth1", "eth1"),
        "HOCCL_NET_PORTS": ("40000-40099", (40000, 40099)),
        "HOCCL_NET_LANES": ("4", 4),
        "HOCCL_NET_CHUNK_BYTES": ("65536", 65536),
        "HOCCL_NET_IN_FLIGHT": ("2", 2),
        "HOCCL_NET_POSTED_BYTES": ("65536", 65536),
        "HOCCL_NET_STAGING": ("on", "on"),
        "HOCCL_NET_BETWEEN": ("nodes", "nodes"),
    }
    fields = dataclasses.fields(Config)
    assert {field.metadata["variable"] for field in fields} == set(texts)
    config = Config.from_env({variable: text for variable, (text, _) in texts.items()})
    for field in fields:
        value = getattr(config, field.name)
        assert value == texts[field.metadata["variable"]][1]
        assert type(value) is type(field.default)
        assert value != field.default


@pytest.mark.parametrize(
    ("variable", "text", "wanted"),
    [
        ("HOCCL_TIMEOUT_S", "soon", "a number of seconds from 0.001 to 1e9"),
        ("HOCCL_TIMEOUT_S", "0", "a number of seconds from 0.001 to 1e9"),
        ("HOCCL_TIMEOUT_S", "nan", "a number of seconds from 0.001 to 1e9"),
        ("HOCCL_TIMEOUT_S", "inf", "a number of seconds from 0.001 to 1e9"),
        ("HOCCL_DISABLE", "maybe", "a boolean"),
        ("HOCCL_COPY_THREADS", "-1", "an integer from 0 to"),
        ("HOCCL_COPY_THREADS", "100000000", "an integer from 0 to 1024"),
        ("HOCCL_CHUNK_BYTES", "0", "an integer from 1 to"),
        ("HOCCL_CHUNK_BYTES", "64k", "an integer from 1 to"),
        ("HOCCL_INLINE_BYTES", "", "an integer from 0 to"),
        ("HOCCL_CROSS_MEMORY", "sometimes", "one of auto, on, off"),
        ("HOCCL_NODE_ID", "two words", "a text without spaces"),
        ("HOCCL_SCHEDULE", "best", "one of auto, plan, direct"),
        ("HOCCL_NET_PORTS", "40099-40000", "a port or a range of ports"),
        ("HOCCL_NET_CHUNK_BYTES", "5000", "a multiple of 4096"),
        ("HOCCL_LOG_LEVEL", "loud", "one of debug, info, warning, error, critical"),
    ],
)
def test_an_error_names_variable_value_and_what_is_wanted(variable: str, text: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='{text}': wanted {wanted}"):
        Config.from_env({variable: text})


def test_the_page_of_settings_is_up_to_date() -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == settings_page(), "write hoccl_jax.config.settings_page() to docs/settings.md"


def test_misspelt_variables_are_named() -> None:
    environ = {"HOCCL_TIMEOUT": "7", "HOCCL_TIMEOUT_S": "7", "HOCCL_LAUNCH_RANK": "0", "HOCCL_ZZZZZZZZ": "", "PATH": "/bin"}
    assert misspelt(environ) == [
        "HOCCL_TIMEOUT is no setting of hoccl_jax; HOCCL_TIMEOUT_S is one",
        "HOCCL_ZZZZZZZZ is no setting of hoccl_jax",
    ]


def test_the_engine_warns_of_misspelt_variables(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    hoccl_jax.shutdown()
    monkeypatch.setenv("HOCCL_COPY_THREAD", "3")
    hoccl_jax.init()
    assert [record.message for record in caplog.records if record.name == "hoccl_jax"] == [
        "HOCCL_COPY_THREAD is no setting of hoccl_jax; HOCCL_COPY_THREADS is one"
    ]
