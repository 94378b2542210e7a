"""LongRoPE (arXiv 2402.13753) with one set of factors: the long one, for every length.

transformers turns all rows of a batch by the long factors once a position in it is beyond the original length, and by the short
ones before. In a batch of strangers an agent's K would depend on who else is there, and on the day it grows long all of it would be
wrong. So the long set is kept from the start, and named in the signature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rewake.errors import ModelError

__all__ = ["freeze_longrope"]

KIND = "longrope"


def freeze_longrope(model: nn.Module) -> dict[str, Any] | None:
    """What of it is part of the signature; None if the model does not turn so. Raises ModelError if its code cannot be held to it."""
    modules: list[Any] = [m for m in model.modules() if getattr(m, "rope_type", None) == KIND]
    for module in modules:
        original = int(module.config.rope_parameters["original_max_position_embeddings"])
        frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[KIND](module.config, None, seq_len=original + 1)
        module.inv_freq.copy_(frequencies)
        module.original_inv_freq.copy_(frequencies)
        module.rope_type = "default"  # which its code never looks at again
        if depends_on_others(module, original):
            raise ModelError("rope type 'longrope', in this model's code, depends on the longest sequence in the batch: so would a cache")
    if not modules:
        return None
    return {"factors": "long", "attention_scaling": float(modules[0].attention_scaling)}


def depends_on_others(module: Any, original: int) -> bool:
    """Whether a token is turned otherwise when another one is beyond the original length."""
    x = torch.zeros(1, 1)

    def turned(*positions: int) -> Tensor:
        with torch.inference_mode():
            return torch.stack(module(x, torch.tensor([positions])))[:, :, 0]

    return not torch.equal(turned(7, 8), turned(7, 2 * original + 8))
