"""Imports point downwards only, nothing outside `backends` knows torch, and `__all__` is true."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import rewake
from rewake import errors

PACKAGE = Path(rewake.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# From the top down: a module may import what stands in its own line or below.
LAYERS = [
    {"__main__"},
    {"cli", "agents_cli", "keys_cli", "play_cli", "terminal"},
    {"workflows"},
    {"client"},
    {"api"},
    {"services"},
    {"service"},
    {"engine", "replay"},
    {"counts"},
    {"memory", "sequence", "scheduler", "text"},
    {"backends"},
    {"store"},
    {"config", "calibration", "heap", "keys", "logs"},
    {"models"},
    {"hub"},
    {"cache"},
    {"spec", "request"},
    {"planes"},
    {"quant"},
    {"errors"},
]
ALLOWED_UP = {("models", "backends")}  # conversion, imported when it is needed


def layer_of(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    me = part(path)
    if me == "__init__":
        return
    for name in imports(path):
        if name.startswith("rewake.") and (me, other := name.split(".")[1]) not in ALLOWED_UP:
            assert layer_of(other) >= layer_of(me), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_backends_import_tensor_libraries(path: Path) -> None:
    if part(path) != "backends":
        assert not {n for n in imports(path) if n.split(".")[0] in ("torch", "accelerate", "gguf", "mlx")}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_all_names_what_is_there(path: Path) -> None:
    if part(path) == "__main__":
        return
    module = importlib.import_module(".".join(("rewake", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"))
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name)


def test_every_error_is_in_the_tree_and_maps_to_a_status() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        error = getattr(errors, name)
        assert name in errors.__doc__
        if issubclass(error, errors.RequestError):
            assert 400 <= error.status < 600 and error.kind


def test_the_package_alone_is_quick_to_import() -> None:
    seen = "import rewake, sys; assert not {'httpx', 'numpy', 'rewake.client'} & set(sys.modules); rewake.Client"
    subprocess.run([sys.executable, "-c", seen], check=True)
