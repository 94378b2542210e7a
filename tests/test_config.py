"""Flags before environment before file, and errors that name the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewake.config import Config, load_config, parse_bytes
from rewake.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 * 2**30), ("512 MB", 512_000_000), ("1.5kib", 1536), ("1000", 1000), ("7B", 7), ("1gib", 2**30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4 apples", "-1", "GiB", "1e9"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a size: .* GB, TB, KiB, MiB, "):
        parse_bytes(text)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('memory = "1GiB"\nport = 1\nkv = "q8"\npersist = false\n')
    environment = {"REWAKE_PORT": "2", "REWAKE_KV": "bf16"}
    config = load_config({"kv": "q4", "port": None}, environment, file)
    assert (config.memory, config.port, config.kv, config.persist) == (2**30, 2, "q4", False)
    assert load_config({}, {}, tmp_path / "none") == Config()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"REWAKE_PORT": "many"}, "REWAKE_PORT is 'many': it must be a whole number"),
        ({"REWAKE_PERSIST": "perhaps"}, "REWAKE_PERSIST .* true or false"),
        ({"REWAKE_MEMORY": "much"}, "REWAKE_MEMORY: 'much' is not a size"),
        ({"REWAKE_KV": "q3"}, "kv is 'q3'"),
        ({"REWAKE_KV": "bf16:32"}, "kv is 'bf16:32'"),
        ({"REWAKE_KV_LOSS": "little"}, "REWAKE_KV_LOSS is 'little': it must be a number"),
        ({"REWAKE_KV_LOSS": "nan"}, "kv_loss is nan"),
        ({"REWAKE_CORS": "*"}, "cors has .*: an origin is"),
        ({"REWAKE_LOG_FORMAT": "xml"}, "log_format is .xml."),
        ({"REWAKE_PORT": "70000"}, "port is 70000"),
        ({"REWAKE_CHUNK": "0"}, "chunk is 0: it must be at least 1"),
    ],
)
def test_errors_name_the_setting(environment: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({}, environment, tmp_path / "none")


@pytest.mark.parametrize("kv", ["auto", "q4:32", "k8v4"])
def test_ways_to_keep_k_and_v(kv: str, tmp_path: Path) -> None:
    config = load_config({"kv": kv, "kv_loss": "0.02"}, {}, tmp_path / "none")
    assert (config.kv, config.kv_loss) == (kv, 0.02)


def test_the_key_is_no_setting(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    assert load_config({}, {"REWAKE_KEY": "secret", "REWAKE_ENCRYPT": "1"}, file).encrypt
    file.write_text('key = "secret"\n')
    with pytest.raises(ConfigError, match="unknown settings key"):
        load_config({}, {}, file)


def test_unknown_settings_in_the_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("ports = 1\n")
    with pytest.raises(ConfigError, match="unknown settings ports"):
        load_config({}, {}, file)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("REWAKE_MEMROY", r"unknown settings REWAKE_MEMROY \(is it REWAKE_MEMORY\?\)"),
        ("REWAKE_MAX_WAITINGS", r"is it REWAKE_MAX_WAITING\?"),
        ("REWAKE_APIKEY", r"is it REWAKE_API_KEY\?"),
        ("REWAKE_MODLE", r"is it REWAKE_MODEL\?"),
        ("REWAKE_MORE_MODELS", "unknown settings REWAKE_MORE_MODELS"),
        ("REWAKE_", "unknown settings REWAKE_$"),
        ("REWAKE_QQQQQ", "unknown settings REWAKE_QQQQQ$"),
    ],
)
def test_unknown_variables_are_refused(variable: str, message: str, tmp_path: Path) -> None:
    """With what may be meant."""
    with pytest.raises(ConfigError, match=message):
        load_config({}, {variable: "1GiB", "REWAKE_PORT": "2"}, tmp_path / "none")


def test_variables_that_are_no_settings_are_let_be(tmp_path: Path) -> None:
    others = {"REWAKE_KEY": "k", "REWAKE_API_KEY": "rw-", "REWAKE_MODELS": "/models", "REWAKE_ISA": "avx2", "OTHER": "x", "MEMORY": "y"}
    assert load_config({}, others, tmp_path / "none") == Config()


def test_a_file_says_what_may_be_meant(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("memroy = 1\n")
    with pytest.raises(ConfigError, match=r"unknown settings memroy \(is it memory\?\)"):
        load_config({}, {}, file)


def test_several_models_are_named_in_every_source(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('model = ["a", "org/b:c.gguf"]\n')
    assert load_config({}, {}, file).models == ("a", "org/b:c.gguf")
    assert load_config({}, {"REWAKE_MODEL": "d, e"}, file).models == ("d", "e")
    assert load_config({"model": ["f", "g", "h"]}, {"REWAKE_MODEL": "d"}, file).models == ("f", "g", "h")
    assert load_config({"model": "f"}, {}, file).models == ("f",)
    (tmp_path / "x,y").mkdir()
    assert load_config({}, {"REWAKE_MODEL": str(tmp_path / "x,y")}, file).models == (str(tmp_path / "x,y"),)
    for wrong in ({"REWAKE_MODEL": "a,,b"}, {"REWAKE_MODEL": ""}):
        with pytest.raises(ConfigError, match="a name is missing"):
            load_config({}, wrong, tmp_path / "none")
    with pytest.raises(ConfigError, match="--record is for one model"):
        load_config({"model": ["a", "b"], "record": "r"}, {}, tmp_path / "none")
