"""Compiles the native kernels where there is a compiler; without one, the install goes on, and torch does their work."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("rewake/backends/torch/kernels")

spec = importlib.util.spec_from_file_location("build_kernels", KERNELS / "build.py")
build_kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_kernels)


class BuildKernels(build_ext):
    """A plain shared library, by the commands of `rewake.backends.torch.kernels.build`."""

    def build_extension(self, ext: Extension) -> None:
        folder = Path(self.get_ext_fullpath(ext.name)).parent
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.announce(build_kernels.build(folder), level=2)
        except (OSError, RuntimeError) as error:
            self.warn(f"no native kernels: {error}")

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + (".dylib" if sys.platform == "darwin" else ".so")


sources = [str(KERNELS / name) for name in build_kernels.SOURCES]
headers = [str(KERNELS / name) for name in build_kernels.HEADERS]
setup(
    ext_modules=[Extension("rewake.backends.torch.kernels._native", sources, depends=headers, optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
