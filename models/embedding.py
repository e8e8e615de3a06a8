"""What enters a stack: vectors of tokens, positions and kinds of segments; and T5's bias per distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from configs.model import ModelConfig
from configs.transformer import TransformerConfig
from models.init import normal
from models.tensor_parallel import regions
from models.tensor_parallel.layers import VocabParallelEmbedding
from models.tensor_parallel.params import ParallelModule, TensorParallel


class ReplicatedEmbedding(ParallelModule):
    """A learned vector per position (or per kind of segment); whole on every rank."""

    def __init__(self, num_embeddings: int, width: int, init_std: float, tp: TensorParallel, device: torch.device):
        super().__init__(tp, device)
        self.add_parameter("weight", (num_embeddings, width), normal(init_std), on_sharded_tokens=tp.sequence_parallel)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids [b or 1, s] -> [s, b or 1, h] (or [s/t, ...]): only the rows of this rank's tokens."""
        index = ids.t()
        if self.tp.sequence_parallel and self.tp.group is not None:
            index = regions.own_slice(index, self.tp.group)
        weight = self.local("weight", torch.float32)
        return nn.functional.embedding(index, weight).to(dtype)


class LanguageModelEmbedding(nn.Module):
    """tokens [b, s] -> hidden [s, b, h] (or [s/t, b, h]). `num_token_types` 0: there are no kinds of segments."""

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        tp: TensorParallel,
        device: torch.device,
        num_token_types: int = 0,
    ):
        super().__init__()
        std, h = transformer.init_method_std, transformer.hidden_size
        self.word_embeddings = VocabParallelEmbedding(model.padded_vocab_size, h, init_std=std, tp=tp, device=device)
        self.position_embeddings = self.token_type_embeddings = None
        if model.position_embedding_type == "learned_absolute":
            self.position_embeddings = ReplicatedEmbedding(model.max_position_embeddings, h, std, tp, device)
        if num_token_types:
            self.token_type_embeddings = ReplicatedEmbedding(num_token_types, h, std, tp, device)

    def forward(self, tokens: Tensor, position_ids: Tensor, dtype: torch.dtype, token_types: Tensor | None = None) -> Tensor:
        """The sum. `token_types` int64 [b, s]; all of kind 0 when None."""
        hidden = self.word_embeddings(tokens, dtype)
        if self.token_type_embeddings is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            hidden = hidden + self.token_type_embeddings(types, dtype)
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids, dtype)
        return hidden


class RelativePositionBias(ParallelModule):
    """A learned number per head and kind of distance, added to the scores of self-attention (Raffel et al. 2020,
    arXiv:1910.10683, section 2.1). Heads are split over the ranks. One for all layers of a stack, none for cross-attention.
    """

    def __init__(
        self, model: ModelConfig, transformer: TransformerConfig, causal: bool, tp: TensorParallel, device: torch.device
    ):
        super().__init__(tp, device)
        self.buckets, self.max_distance = model.relative_attention_num_buckets, model.relative_attention_max_distance
        self.causal = causal
        shape = (self.buckets, transformer.num_attention_heads)
        self.add_parameter("weight", shape, normal(transformer.init_method_std), shard_dim=1)

    def forward(self, num_queries: int, num_keys: int, dtype: torch.dtype) -> Tensor:
        """[1, n/t, queries, keys]; the last query stands where the last key does."""
        weight = self.local("weight", torch.float32)
        keys = torch.arange(num_keys, device=weight.device)
        distance = keys - keys[num_keys - num_queries :, None]
        bucket = relative_bucket(distance, self.buckets, self.max_distance, self.causal)
        return nn.functional.embedding(bucket, weight).permute(2, 0, 1)[None].to(dtype)


def relative_bucket(distance: Tensor, buckets: int, max_distance: int, causal: bool) -> Tensor:
    """The bucket of each distance (key's position - query's), int64.

    Causal: keys after the query share bucket 0 with distance 0. Else half of the buckets are for keys after the query. Of each
    direction's buckets the first half are for one distance each, the others grow with its logarithm up to `max_distance`.
    """
    first = torch.zeros_like(distance)
    if causal:
        distance = (-distance).clamp(min=0)
    else:
        buckets //= 2
        first, distance = (distance > 0) * buckets, distance.abs()
    exact = buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)
