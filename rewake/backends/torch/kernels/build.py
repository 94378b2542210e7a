"""Compiles the native kernels in place: `python -m rewake.backends.torch.kernels.build`.

The same command an install runs (`command`), with the system's compiler or $CXX. Knows nothing of what is compiled.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["COMPILE_ARGS", "HEADERS", "SOURCES", "build", "command"]

HERE = Path(__file__).parent
SOURCES = ("native.cpp",)
HEADERS = (
    "abi.h",
    "kernels_append.h",
    "kernels_attend.h",
    "kernels_attend_tiles.h",
    "kernels_codes.h",
    "kernels_linear.h",
    "kernels_scores.h",
    "kernels_tiles.h",
    "kernels_values.h",
    "pack.h",
    "pool.h",
    "simd_avx2.h",
    "simd_avx512.h",
    "simd_portable.h",
    "step.h",
)
# No contraction: coding must round as numpy does, and a row's bits must not depend on where the compiler fuses.
COMPILE_ARGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi")


def command(compiler: str, target: Path) -> list[str]:
    return [*shlex.split(compiler), *COMPILE_ARGS, "-shared", *(str(HERE / s) for s in SOURCES), "-o", str(target)]


def build(directory: Path = HERE) -> str:
    """Compile into `directory`. Returns what was done."""
    compiler = os.environ.get("CXX") or "c++"
    target = directory / f"_native{'.dylib' if sys.platform == 'darwin' else '.so'}"
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        args = command(compiler, Path(scratch) / target.name)
        done = subprocess.run(args, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} could not compile the native kernels:\n{done.stderr}")
        (Path(scratch) / target.name).replace(target)  # whoever has the old one loaded keeps it
    return f"built {target} ({sysconfig.get_platform()})\n  {shlex.join(args)}"


if __name__ == "__main__":
    try:
        sys.stdout.write(build() + "\n")
    except (OSError, RuntimeError) as error:
        sys.exit(str(error))
