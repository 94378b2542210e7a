"""GGUF to a folder of safetensors, once: transformers reads GGUF, but slowly, and does not save what it read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from rewake.errors import ModelError

__all__ = ["convert_gguf"]

# How text is split before byte-level BPE, by the name GGUF gives it; transformers ignores it and splits as GPT-2 does.
PRE_TOKENIZERS = {
    "default": (),
    "gpt-2": (),
    "smollm": (pre_tokenizers.Digits(individual_digits=True),),
}


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model of `gguf` to the folder `target`, weights dequantised to bfloat16. Raises ModelError."""
    split = pre_tokenizer_of(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tied = bool(model.config.tie_word_embeddings)
    weights = {name: w.contiguous() for name, w in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = None
    del model.config.quantization_config
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)
    if split:
        add_pre_tokenizers(target / "tokenizer.json", split)


def pre_tokenizer_of(gguf: Path) -> tuple[Any, ...]:
    fields = GGUFReader(gguf).fields
    kind = fields["tokenizer.ggml.model"].contents() if "tokenizer.ggml.model" in fields else None
    if kind != "gpt2":  # others do not split before their model
        return ()
    name = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "default"
    if name not in PRE_TOKENIZERS:
        raise ModelError(f"{gguf.name}: its text is split by the rules {name!r}, which we do not know: use the model's safetensors instead")
    return PRE_TOKENIZERS[name]


def add_pre_tokenizers(path: Path, split: tuple[Any, ...]) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, tokenizer.pre_tokenizer])
    tokenizer.save(str(path))
