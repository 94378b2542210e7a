"""transformers: `generate` in bf16 with SDPA and its dynamic cache, one sequence, nothing kept between two calls."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.peers.base import THREADS, Generate, Peer, Times, serve

__all__ = ["Transformers"]


class Transformers(Peer):
    name = "transformers"
    kv = "bf16"
    reuses = False
    batches = False

    def python(self) -> Path:
        return Path(sys.executable)  # it is one of our own dependencies

    @property
    def arguments(self) -> list[str]:
        from rewake.models import DEFAULT_MODEL, resolve

        return [str(resolve(DEFAULT_MODEL))]


def start() -> tuple[str, Generate]:
    import torch
    import transformers
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(THREADS)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None

    class Clock(BaseStreamer):  # type: ignore[misc]
        """Told of the prompt first, then of each token."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None: ...

    def generate(prompts: list[list[int]], new: int) -> Times:
        (prompt,) = prompts
        clock = Clock()
        started = time.perf_counter()
        ids = torch.tensor([prompt])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, streamer=clock)
        return [[(t - started) * 1000 for t in clock.times[1:]]]

    return f"transformers {transformers.__version__}, torch {torch.__version__}", generate


if __name__ == "__main__":
    serve(start)
