"""Multi-head latent attention with absorbed projections: what is cached is the latent, not the heads made from it.

DeepSeek-V2 (arXiv 2405.04434, section 2.1) caches one vector for all heads, and makes keys and values from it by a
projection. That projection moves to the other side of the products: q is projected down to the latent's space before
the scores, and what attention returns, a mixture of latents, is projected up to the heads' values after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Absorbed", "absorb"]


@dataclass(frozen=True, eq=False)
class Absorbed:
    """A layer's two projections: `down` [heads, nope_dim, latent_dim] and `up` [heads, v_dim, latent_dim]."""

    down: Tensor
    up: Tensor

    def project_query(self, q: Tensor) -> Tensor:
        """[tokens, heads, nope_dim + rope_dim] to [tokens, heads, latent_dim + rope_dim]."""
        nope = self.down.shape[1]
        return torch.cat((torch.einsum("thn,hnl->thl", q[..., :nope], self.down), q[..., nope:]), -1)

    def project_output(self, mixed: Tensor) -> Tensor:
        """[tokens, heads, latent_dim] to [tokens, heads, v_dim]."""
        return torch.einsum("thl,hvl->thv", mixed, self.up)


def absorb(model: nn.Module) -> bool:
    """Have all attention modules hand over latents. False, and nothing changed, if the model's code has no place for that."""
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "expand_kv") and hasattr(m, "kv_b_proj")]
    for module in modules:
        weight = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
        module.absorbed = Absorbed(weight[:, : module.qk_nope_head_dim], weight[:, module.qk_nope_head_dim :])
        module.expand_kv = hand_over
    return bool(modules)


def hand_over(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """In place of transformers' `expand_kv`: K is latent and rotary part of one head, V the latent."""
    return torch.cat((latent, rope), -1), latent
