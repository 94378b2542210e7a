"""A tiny random model as a GGUF file, written with the format's own library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n{% endfor %}<|im_start|>assistant: "
HEADS, DIM, HIDDEN = 2, 32, 96


def write_tiny_gguf(path: Path) -> None:
    """One layer of a Llama with bytes as tokens."""
    tokens = [*sorted(ByteLevel.alphabet()), "ab", "<|im_start|>", "<|im_end|>"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(HEADS * DIM)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(DIM)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * 257 + [TokenType.CONTROL] * 2)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    width = HEADS * DIM
    shapes = {
        "token_embd.weight": (len(tokens), width),
        "output.weight": (len(tokens), width),
        **{f"blk.0.attn_{part}.weight": (width, width) for part in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{part}.weight": (HIDDEN, width) for part in ("gate", "up")},
        "blk.0.ffn_down.weight": (width, HIDDEN),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.1, shape).astype(np.float32))
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
