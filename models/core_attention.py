"""softmax(q k^T / sqrt d) v, in the two attention backends.

Shapes: q [s, b, n/t, d], k and v [s, b, g/t, d] -> [s, b, (n/t) d]. Head i uses key/value head i // (n/g).
attention_mask boolean [b or 1, 1, s, s], True = masked out; it is combined with the causal and window masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from fusions.fused_softmax import causal_mask
from fusions.random import MaskKey
from models.init import constant
from models.tensor_parallel.params import ParallelModule, TensorParallel


class UnfusedAttention(ParallelModule):
    """Scores, softmax and product apart; the softmax is the slot's function."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax: Callable[..., Tensor],
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__(tp, device)
        self.softmax, self.dropout_prob = softmax, config.attention_dropout
        self.window, self.in_fp32 = config.window_size, config.attention_softmax_in_fp32
        # Query-key layer scaling keeps half-precision scores small: divided by the layer number here, multiplied back in fp32.
        self.softmax_scale = float(layer_number) if config.apply_query_key_layer_scaling else 1.0
        self.query_scale = 1.0 / (math.sqrt(config.head_size) * self.softmax_scale)
        self.softmax_type = config.softmax_type
        if self.softmax_type == "learnable":
            self.add_parameter("softmax_offset", (config.num_attention_heads,), constant(0.0), shard_dim=0)
        self.off_by_one = torch.zeros((), device=device) if self.softmax_type == "off-by-one" else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, mask_key: MaskKey | None) -> Tensor:
        """The context of each query."""
        s, b, n, d = q.shape
        g = k.shape[2]
        q = (q * self.query_scale).view(s, b, g, n // g, d).permute(1, 2, 3, 0, 4).reshape(b * g, n // g * s, d)
        k = k.permute(1, 2, 3, 0).reshape(b * g, d, s)
        v = v.permute(1, 2, 0, 3).reshape(b * g, s, d)
        scores = torch.bmm(q, k).view(b, n, s, s)
        probs = self.softmax(
            scores,
            attention_mask,
            scale=self.softmax_scale,
            causal=True,
            window=self.window,
            in_fp32=self.in_fp32,
            dropout_prob=self.dropout_prob if self.training else 0.0,
            mask_key=mask_key,
            sink=self.local("softmax_offset", torch.float32) if self.softmax_type == "learnable" else self.off_by_one,
        )
        context = torch.bmm(probs.view(b * g, n // g * s, s), v)  # [b g, (n/g) s, d]
        return context.view(b, n, s, d).permute(2, 0, 1, 3).reshape(s, b, n * d)


class SDPAttention(nn.Module):
    """PyTorch's scaled_dot_product_attention; the scores are never in memory."""

    def __init__(self, config: TransformerConfig, layer_number: int, tp: TensorParallel, device: torch.device):
        super().__init__()
        self.window = config.window_size

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, mask_key: MaskKey | None) -> Tensor:
        """The context of each query. `mask_key` is unused: dropout is refused with this backend."""
        s, b, n, d = q.shape
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s, d]
        visible = None
        if attention_mask is not None or self.window is not None:
            hidden = causal_mask(s, s, self.window, q.device)
            visible = ~(hidden if attention_mask is None else hidden | attention_mask)
        gqa = k.shape[1] != n
        context = F.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None, enable_gqa=gqa)
        if attention_mask is not None and visible is not None:
            context = torch.where(visible.any(-1, keepdim=True), context, 0.0)  # a row with nothing to see gives zeros
        return context.permute(2, 0, 1, 3).reshape(s, b, n * d)
