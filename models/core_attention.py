"""softmax(scale q k^T + position bias) v, in the two attention backends.

Shapes: q [s, b, n/t, d], k and v [sk, b, g/t, d] -> [s, b, (n/t) d]. Head i uses key/value head i // (n/g). attention_mask
boolean [b or 1, 1, s or 1, sk], True = masked out; it is combined with the causal and window masks. position_bias
[1, n/t, s, sk]. With more keys than queries (a cache) the last query sees the last key.
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
        causal: bool,
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__(tp, device)
        self.softmax, self.causal, self.dropout_prob = softmax, causal, config.attention_dropout
        self.window, self.in_fp32 = config.window_size, config.attention_softmax_in_fp32
        # Query-key layer scaling keeps half-precision scores small: divided by the layer number here, multiplied back in fp32.
        self.softmax_scale = float(layer_number) if config.apply_query_key_layer_scaling else 1.0
        self.query_scale = scale_of(config) / self.softmax_scale
        self.softmax_type = config.softmax_type
        if self.softmax_type == "learnable":
            self.add_parameter("softmax_offset", (config.num_attention_heads,), constant(0.0), shard_dim=0)
        self.off_by_one = torch.zeros((), device=device) if self.softmax_type == "off-by-one" else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        position_bias: Tensor | None,
        mask_key: MaskKey | None,
    ) -> Tensor:
        """The context of each query."""
        (s, b, n, d), (sk, _, g, _) = q.shape, k.shape
        q = q if self.query_scale == 1.0 else q * self.query_scale
        q = q.reshape(s, b, g, n // g, d).permute(1, 2, 3, 0, 4).reshape(b * g, n // g * s, d)
        k = k.permute(1, 2, 3, 0).reshape(b * g, d, sk)
        v = v.permute(1, 2, 0, 3).reshape(b * g, sk, d)
        scores = torch.bmm(q, k).view(b, n, s, sk)
        if position_bias is not None:
            scores = scores + (position_bias if self.softmax_scale == 1.0 else position_bias / self.softmax_scale)
        probs = self.softmax(
            scores,
            attention_mask,
            scale=self.softmax_scale,
            causal=self.causal,
            window=self.window,
            in_fp32=self.in_fp32,
            dropout_prob=self.dropout_prob if self.training else 0.0,
            mask_key=mask_key,
            sink=self.local("softmax_offset", q.dtype).float() if self.softmax_type == "learnable" else self.off_by_one,
        )
        context = torch.bmm(probs.view(b * g, n // g * s, sk), v)  # [b g, (n/g) s, d]
        return context.view(b, n, s, d).permute(2, 0, 1, 3).reshape(s, b, n * d)


class SDPAttention(nn.Module):
    """PyTorch's scaled_dot_product_attention; the scores are never in memory."""

    def __init__(self, config: TransformerConfig, layer_number: int, causal: bool, tp: TensorParallel, device: torch.device):
        super().__init__()
        self.causal, self.window, self.scale = causal, config.window_size, scale_of(config)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        position_bias: Tensor | None,
        mask_key: MaskKey | None,
    ) -> Tensor:
        """The context of each query. `mask_key` is unused: dropout is refused with this backend."""
        (s, b, n, d), sk = q.shape, k.shape[0]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s, d]
        # Its own causal mask lets the first query see the first key: right only for a square.
        plain = self.window is None and attention_mask is None and position_bias is None and s == sk
        hidden = attention_mask
        if self.causal and not plain:
            outside = causal_mask(s, sk, self.window, q.device)
            hidden = outside if hidden is None else hidden | outside
        visible = None if hidden is None else ~hidden
        bias = visible
        if position_bias is not None:
            bias = position_bias
            if hidden is not None:  # not -inf: a row with nothing to see stays finite, and is set to 0 below
                bias = position_bias.masked_fill(hidden, torch.finfo(position_bias.dtype).min)
        context = F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=self.causal and plain, scale=self.scale, enable_gqa=k.shape[1] != n
        )
        if attention_mask is not None and visible is not None:
            context = torch.where(visible.any(-1, keepdim=True), context, 0.0)  # a row with nothing to see gives zeros
        return context.permute(2, 0, 1, 3).reshape(s, b, n * d)


def scale_of(config: TransformerConfig) -> float:
    """The factor on q k^T."""
    return 1.0 / math.sqrt(config.head_size) if config.attention_scale is None else config.attention_scale
