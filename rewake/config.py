"""The one configuration record. Flags, environment names and their help are generated from its fields.

A flag wins over `REWAKE_NAME` in the environment, that over `~/.config/rewake/config.toml`, that over the default.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from platformdirs import user_config_path, user_data_path

from rewake.errors import ConfigError
from rewake.models import DEFAULT_MODEL
from rewake.quant import CODINGS

__all__ = ["AUTO", "KEY_FILE", "LOOPBACK", "SHIPPED", "WEIGHTS", "Config", "add_flags", "load_config", "parse_bytes"]

KEY_FILE = user_config_path("rewake") / "key"  # never a flag: other users see those

AUTO = "auto"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
ORIGIN = re.compile(r"https?://[^/*\s,]+")
SHIPPED = "shipped"
WEIGHTS = (SHIPPED, "q8", "q4")
CHOICES = {
    "kv": (*CODINGS, AUTO),
    "weights": WEIGHTS,
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
PREFIX = "REWAKE_"
NO_SETTINGS = ("KEY", "API_KEY", "MODELS", "ISA")  # variables that say something else: secrets, a folder, an instruction set
SIZES = ("memory", "disk")  # settings in bytes
MORE_MODELS = "more_models"  # no setting of its own: `model` may be several


def setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Config:
    """Everything a user can set. Sizes are bytes; 0 means "choose for me" where it says so."""

    model: str = setting(DEFAULT_MODEL, "folder, .gguf file, Hub repository (org/name, org/name:file.gguf), or a known name")
    more_models: tuple[str, ...] = setting((), "")  # those behind the first --model
    max_loaded: int = setting(0, "models in memory at once, which share --memory equally (0: all that are served)")
    idle_unload: int = setting(0, "seconds without a request after which a model is unloaded (0: never)")
    data: Path = setting(user_data_path("rewake"), "directory of memories")
    memory: int = setting(4 * 2**30, "bytes for pages in memory, such as 4GiB")
    disk: int = setting(32 * 2**30, "bytes for pages on disk; what is worth least is forgotten beyond that")
    kv: str = setting("q4", f"how K and V are kept: {', '.join(CODINGS)} (:32 is the group size), or auto: see --kv-loss")
    kv_loss: float = setting(0.01, "what --kv auto may lose of perplexity: it takes the smallest codec that loses at most that")
    weights: str = setting(SHIPPED, "how weights are kept: shipped (as they are), or safetensors coded on load: q8, q4")
    context: int = setting(0, "longest prompt + answer in tokens (0: the model's)")
    max_running: int = setting(16, "requests computed together")
    max_waiting: int = setting(256, "requests that may wait before more are refused")
    drain: int = setting(10, "seconds that answers have to end when the server is told to stop")
    chunk: int = setting(512, "prompt tokens computed in a step")
    threads: int = setting(0, "threads to compute with (0: all cores)")
    host: str = setting("127.0.0.1", "address to listen on; other than loopback only with --keys")
    port: int = setting(8000, "port to listen on")
    persist: bool = setting(True, "keep memories on disk (--no-persist: only in memory)")
    encrypt: bool = setting(
        False,
        "encrypt memories on disk, with the key in REWAKE_KEY, or in the file `key` beside config.toml (made if missing: keep a copy)",
    )
    keys: str = setting("", "file of API keys, which `rewake keys` makes: every request needs one then")
    cors: str = setting("", "origins of web pages that may ask, such as http://localhost:3000, separated by commas (none)")
    record: str = setting("", "file to record every step to, for `rewake replay`")
    log_level: str = setting("info", "debug, info, warning or error")
    log_format: str = setting("text", "text, or json: one object a line")
    log_prompts: bool = setting(False, "log what is asked and answered, too")

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (chosen := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} is {chosen!r}: it must be one of {', '.join(choices)}")
        if not 0 <= self.kv_loss < float("inf"):
            raise ConfigError(f"kv_loss is {self.kv_loss}: it must be at least 0, such as 0.01 for 1 %")
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors has {origin!r}: an origin is a scheme and a host, and a port if need be, such as http://localhost:3000"
                )
        if not 0 < self.port < 65536:
            raise ConfigError(f"port is {self.port}: it must be 1 to 65535")
        for name, least in (
            ("memory", 1),
            ("disk", 1),
            ("max_running", 1),
            ("max_waiting", 1),
            ("drain", 0),
            ("chunk", 1),
            ("context", 0),
            ("threads", 0),
            ("max_loaded", 0),
            ("idle_unload", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least {least}")
        if len(self.models) > 1 and self.record:
            raise ConfigError("--record is for one model: start a server for each")

    @property
    def models(self) -> tuple[str, ...]:
        """All that are served; the first is the default."""
        return (self.model, *self.more_models)

    @property
    def origins(self) -> tuple[str, ...]:
        """Of pages that may ask."""
        return tuple(origin.strip() for origin in self.cors.split(",") if origin.strip())

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK


def parse_bytes(text: str) -> int:
    """`4GiB`, `512 MB` or `1000000`. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        units = ", ".join(unit.replace("IB", "iB") for unit in UNITS if len(unit) > 1)
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with {units}")
    return int(float(match[1]) * UNITS[match[2].upper()])


def add_flags(parser: argparse.ArgumentParser, only: tuple[str, ...] = (), helps: Mapping[str, str] = MappingProxyType({})) -> None:
    """One flag for each setting (or for those in `only`); a default of None tells that it was not given.

    `helps` is for commands to which a setting means something else.
    """
    for f in fields(Config):
        if f.name == MORE_MODELS or (only and f.name not in only):
            continue
        flag = "--" + f.name.replace("_", "-")
        help = helps.get(f.name, f.metadata["help"])
        if f.name == "model" and not only:
            again = "; given several times, several are served, each loaded when it is asked for"
            parser.add_argument(flag, metavar="MODEL", action="append", help=f"{help}{again} ({f.default})")
        elif f.type == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help)
        else:
            shown = "" if f.default in ("", 0) or f.name == "kv" else f" ({show(f.name, f.default)})"
            parser.add_argument(flag, metavar=f.name.upper(), help=help + shown.replace("%", "%%"))


def show(name: str, value: Any) -> str:
    return f"{value // 2**30}GiB" if name in SIZES else str(value)


def load_config(flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: Path | None = None) -> Config:
    """Merge the three sources. Raises ConfigError that names the setting and where it was set."""
    file = file or user_config_path("rewake") / "config.toml"
    stored: dict[str, Any] = {}
    if file.is_file():
        try:
            stored = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: {error}") from error
    names = {f.name for f in fields(Config) if f.name != MORE_MODELS}
    check_known(stored, names, f"{file}: unknown settings")
    variables = {name.upper() for name in (*names, *NO_SETTINGS)}
    given = (name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX))
    check_known(given, variables, "in the environment: unknown settings", PREFIX)
    values: dict[str, Any] = {}
    for f in fields(Config):
        if f.name == MORE_MODELS:
            continue
        variable = f"{PREFIX}{f.name.upper()}"
        if flags.get(f.name) is not None:
            values[f.name] = convert(f.name, str(f.type), flags[f.name], f"--{f.name.replace('_', '-')}")
        elif variable in environment:
            values[f.name] = convert(f.name, str(f.type), environment[variable], variable)
        elif f.name in stored:
            values[f.name] = convert(f.name, str(f.type), stored[f.name], f"{file}: {f.name}")
    return Config(**{**values, **models_of(values)})


def check_known(given: Iterable[str], known: Iterable[str], where: str, prefix: str = "") -> None:
    """Raises ConfigError for names that mean nothing, with those that may be meant: a setting that is not obeyed is worse than none."""
    unknown = sorted({*given}.difference(known))
    if unknown:
        near = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
        told = (prefix + name + (f" (is it {prefix}{near[name][0]}?)" if near[name] else "") for name in unknown)
        raise ConfigError(f"{where} {', '.join(told)}")


def models_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """One model, or several: a list, or their names with commas between them."""
    given = values.get("model", DEFAULT_MODEL)
    names = given if isinstance(given, list) else [given] if Path(given).expanduser().exists() else str(given).split(",")
    first, *more = [str(name).strip() for name in names]
    if not first or not all(more):
        raise ConfigError(f"model is {given!r}: a name is missing")
    return {"model": first, MORE_MODELS: tuple(more)}


def convert(name: str, kind: str, value: Any, where: str) -> Any:
    """A setting's text (or TOML value) as its type."""
    try:
        if name in SIZES:
            return parse_bytes(str(value))
        if kind == "bool":
            return value if isinstance(value, bool) else {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
        if kind == "Path":
            return Path(value).expanduser()
        if kind == "int" and (isinstance(value, (bool, float)) or not isinstance(value, (str, int))):
            raise ValueError
        if kind == "float":
            return float(value)
        if name == "model" and isinstance(value, list):
            return [str(v) for v in value]
        return int(value) if kind == "int" else str(value)
    except (ValueError, KeyError, TypeError):
        wanted = {"bool": "true or false", "float": "a number"}.get(kind, "a whole number")
        raise ConfigError(f"{where} is {value!r}: it must be {wanted}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
