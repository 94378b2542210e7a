"""GGUF to a folder of safetensors, once, because reading GGUF is slow.

The folder has the weights twice: dequantised, for transformers, and where the native step takes the model, in the blocks
they are shipped in. Neither is read for the other's sake.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from rewake.backends.torch.blocks import BLOCKS
from rewake.backends.torch.dense import CODED, TOP, is_gemma, of_layer, why_not_dense
from rewake.backends.torch.eager import LOADING
from rewake.errors import ModelError

__all__ = ["convert_gguf"]

# How text is split before byte-level BPE, by the name GGUF gives it; transformers ignores it and splits as GPT-2 does.
PRE_TOKENIZERS = {
    "default": (),
    "gpt-2": (),
    "smollm": (pre_tokenizers.Digits(individual_digits=True),),
}


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model of `gguf` to the folder `target`, weights as they are and dequantised to bfloat16. Raises ModelError."""
    try:
        convert(gguf, target)
    except (OSError, ValueError, LookupError, NotImplementedError) as error:  # no GGUF, or cut, or of a kind its readers do not know
        raise ModelError(f"{gguf.name} cannot be converted: {error}") from error


def convert(gguf: Path, target: Path) -> None:
    split = pre_tokenizer_of(gguf)
    with LOADING:
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
    config = model.config.to_dict()
    if why_not_dense(config) is None:
        write_coded(gguf, target / CODED, config)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)
    if split:
        add_pre_tokenizers(target / "tokenizer.json", split)


def write_coded(gguf: Path, target: Path, config: dict[str, Any]) -> None:
    """Weights by their names on the Hub: blocks that the native step knows as rows of bytes, others as bfloat16, vectors as float32.

    The file's metadata say which blocks a tensor is made of, in one entry: several would be written in another order each time, and
    the same weights would have other digests.
    """
    names = {theirs: ours for ours, theirs in TOP.values()}
    for i in range(config["num_hidden_layers"]):
        names |= {f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}" for ours, theirs in of_layer(config).values()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors, kinds = {}, {}
    for tensor in GGUFReader(gguf).tensors:
        stem, _, suffix = tensor.name.rpartition(".")
        if stem not in names:
            continue
        name, kind, outputs = f"{names[stem]}.{suffix}", tensor.tensor_type.name, int(tensor.shape[-1])
        x = np.array(tensor.data) if kind in BLOCKS or kind == "F32" else dequantize(tensor.data, tensor.tensor_type)
        x = x.reshape(outputs, -1) if len(tensor.shape) > 1 else x.reshape(-1)
        part = stem.rpartition(".")[2]
        if part in heads and config["model_type"] in ("llama", "mistral"):
            x = halves_of_planes(x, heads[part])
        if is_gemma(config) and len(tensor.shape) == 1:
            x = x - np.float32(1)  # norms: GGUF has what they multiply by
        found = torch.from_numpy(np.ascontiguousarray(x))
        tensors[name] = found.bfloat16() if kind not in BLOCKS and len(tensor.shape) > 1 else found
        if kind in BLOCKS:
            kinds[name] = kind
    target.parent.mkdir()
    save_file(tensors, target, metadata={"blocks": json.dumps(kinds, sort_keys=True)})


def halves_of_planes(x: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of q and k as on the Hub: of each head the first coordinates of all planes, then the second ones; GGUF has them in pairs."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


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
