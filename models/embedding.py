"""Token and position embedding, with their dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.run import ModelConfig
from configs.transformer import TransformerConfig
from fusions.random import MaskKey, dropout, random_mask_key
from models.init import normal
from models.tensor_parallel import regions
from models.tensor_parallel.layers import VocabParallelEmbedding
from models.tensor_parallel.params import ParallelModule, TensorParallel


class PositionEmbedding(ParallelModule):
    """A learned vector per position; whole on every rank."""

    def __init__(self, num_positions: int, width: int, init_std: float, tp: TensorParallel, device: torch.device):
        super().__init__(tp, device)
        self.add_parameter("weight", (num_positions, width), normal(init_std))

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """position_ids [b or 1, s] -> [s, b or 1, h] (or [s/t, ...]): only the rows of this rank's tokens."""
        index = position_ids.t()
        if self.tp.sequence_parallel and self.tp.group is not None:
            index = regions.own_slice(index, self.tp.group)
        weight = self.local("weight", torch.float32, on_sharded_tokens=self.tp.sequence_parallel)
        return nn.functional.embedding(index, weight).to(dtype)


class LanguageModelEmbedding(nn.Module):
    """tokens [b, s] -> hidden [s, b, h] (or [s/t, b, h])."""

    def __init__(self, model: ModelConfig, transformer: TransformerConfig, tp: TensorParallel, device: torch.device):
        super().__init__()
        std, h = transformer.init_method_std, transformer.hidden_size
        self.hidden_dropout = transformer.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(model.padded_vocab_size, h, init_std=std, tp=tp, device=device)
        self.position_embeddings = None
        if model.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(model.max_position_embeddings, h, std, tp, device)

    def forward(self, tokens: Tensor, position_ids: Tensor, dtype: torch.dtype, mask_key: MaskKey | None) -> Tensor:
        """Word + position, dropped."""
        hidden = self.word_embeddings(tokens, dtype)
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids, dtype)
        if self.training and self.hidden_dropout > 0:
            hidden = dropout(hidden, self.hidden_dropout, mask_key or random_mask_key(hidden))
        return hidden
