"""How many idle agents fit into 10.2 GiB, each at exactly N tokens and ready to go on: by filling memory, not by division.

The geometries are those of "Agent Memory Below the Prompt" (arXiv 2603.04428, table 2, which was computed and never measured);
no weights are needed. The arena, its pool, the page tables and what leaves memory are those that serve; in the place of a model
every slot that a step takes is written, from end to end. Agents are added until one that was there cannot go on any more from
what is in memory. There is no disk behind it. What is counted is then read back: every slot holds what was written for its agent.

  Gemma 3 12B       48 layers, 8 KV heads of 256; 40 of them see 1,024 tokens, and hold no more in memory than that
  DeepSeek-V2-Lite  27 layers of one latent of 576 values a token
  Llama 3.1 8B      32 layers, 8 KV heads of 128
"""

from __future__ import annotations

import argparse
import queue
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.common import Bar, finish, flags, table
from rewake.memory.memory import AgentMemory
from rewake.planes import PagePlanes
from rewake.quant import CODINGS
from rewake.request import Request, Sampling
from rewake.sequence import Sequence
from rewake.spec import ModelCacheSpec

BUDGET = int(10.2 * 2**30)
SIZES = (4096, 8192, 16384, 32768)
CHUNK = 512
NAMESPACE = "default"
COMMON = {"vocab_size": 128_000, "max_position_embeddings": 131_072}
CONFIGS: dict[str, dict[str, Any]] = {
    "Gemma 3 12B": {
        **COMMON,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    },
    "DeepSeek-V2-Lite": {
        **COMMON,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "Llama 3.1 8B": {**COMMON, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}
PAPER = {"Gemma 3 12B": (24, 12, 6, 3), "DeepSeek-V2-Lite": (33, 16, 8, 4), "Llama 3.1 8B": (70, 35, 17, 8)}
BARS = {"Gemma 3 12B": (62, 43, 26, 15), "DeepSeek-V2-Lite": (298, 149, 74, 37), "Llama 3.1 8B": (72, 36, 18, 9)}


class Crowd:
    """Agents of `size` tokens in one arena."""

    def __init__(self, arena: np.ndarray[Any, Any], planes: PagePlanes, size: int, written: int) -> None:
        """Of each slot, `written` bytes are filled."""
        self.planes, self.size, self.written = planes, size, min(written, planes.slot_bytes)
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.memory = AgentMemory(arena, planes, b"capacity", None, self.posted.put, most_step=CHUNK)
        self.arena = arena

    def add(self, number: int) -> None:
        """Compute a prompt of `size` tokens, and end."""
        prompt = np.full(self.size, number, np.int32)
        request = Request(str(number), tuple(prompt.tolist()), 1, lambda _: None, Sampling(temperature=0), agent=str(number))
        ready: list[Sequence | None] = []
        assert self.memory.open(request, ready.append) and ready[0] is not None, "no room for one more, though nobody is at work"
        sequence = ready[0]
        for length in range(CHUNK, self.size + 1, CHUNK):
            self.memory.grow(sequence, length)
            for places in sequence.tables(self.planes):
                for slot in places[(length - CHUNK) // 256 : length // 256]:
                    self.arena[slot : slot + self.written].view(np.int32)[:] = number
            self.memory.advance(sequence, length)
        self.memory.close(sequence, lambda _: None)

    def is_ready(self, number: int) -> bool:
        """Whether an agent can go on at once: all that its next token attends to is in memory."""
        if (NAMESPACE, str(number)) not in self.memory.tree.agents:
            return False
        agent = self.memory.agents.show(NAMESPACE, str(number))
        return agent.state == "hot" and agent.tokens == self.size

    def is_intact(self, number: int) -> bool:
        head = self.memory.tree.agents[NAMESPACE, str(number)].head
        assert head is not None
        slots = [slot for page in head.parent.path() for own in page.slots.values() for slot in own]
        return all((self.arena[slot : slot + self.written].view(np.int32) == number).all() for slot in slots)


def fitting(arena: np.ndarray[Any, Any], planes: PagePlanes, size: int, written: int) -> int:
    """How many agents there are just before one has to leave for another."""
    crowd, count = Crowd(arena, planes, size, written), 0
    while True:
        crowd.add(count + 1)
        if not all(crowd.is_ready(i) for i in (1, count + 1)):  # the one that came first goes first
            break
        count += 1
    crowd.memory.check()
    assert all(crowd.is_intact(i) for i in range(1, count + 2) if crowd.is_ready(i)), "an agent's slots hold something else"
    crowd.memory.ledger.close()
    return count


def main(args: argparse.Namespace) -> int:
    arena = np.zeros(BUDGET, np.uint8)
    written = 4096 if args.quick else BUDGET
    rows, bars = [], []
    for model, config in CONFIGS.items():
        spec = ModelCacheSpec.from_config(config)
        for kv in ("q4", "q4+", "bf16"):
            if kv not in CODINGS:
                continue
            planes = spec.planes(*CODINGS[kv])
            counts = [fitting(arena, planes, size, written) for size in SIZES]
            shown = {f"{size // 1024}k": count for size, count in zip(SIZES, counts, strict=True)}
            rows.append({"model": model, "kv": kv, "slot MB": planes.slot_bytes / 1e6, "slots": BUDGET // planes.slot_bytes, **shown})
            print(f"{model} {kv}: {shown}", flush=True)
            if kv == "q4":
                bars += [Bar("capacity", f"{model} at {s // 1024}k", n, bar) for s, n, bar in zip(SIZES, counts, BARS[model], strict=True)]
        rows.append({"model": model, "kv": "the paper's", **{f"{s // 1024}k": n for s, n in zip(SIZES, PAPER[model], strict=True)}})
    print()
    table(rows)
    return finish("capacity", rows, bars, args)


if __name__ == "__main__":
    raise SystemExit(main(flags(__doc__).parse_args()))
