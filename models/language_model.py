"""What GPT, BERT and T5 have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.model import ModelConfig
from configs.transformer import TransformerConfig
from models.rotary import Rotary, RotaryTables
from models.tensor_parallel.params import TensorParallel
from models.transformer_block import TransformerBlock


class LanguageModel(nn.Module):
    """Parameters are fp32; the computation runs in `compute_dtype`. At tensor-parallel size 1 it is an ordinary module and
    needs no process group.
    """

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        tp: TensorParallel | None,
        device: torch.device | str,
        compute_dtype: torch.dtype,
    ):
        super().__init__()
        self.device, self.tp = torch.device(device), tp or TensorParallel()
        self.config, self.compute_dtype, self.max_positions = transformer, compute_dtype, model.max_position_embeddings
        rope = model.position_embedding_type == "rope"
        self.rotary_tables = RotaryTables(model, transformer, self.device) if rope else None

    @property
    def num_dropout_sites(self) -> int:
        """Rows that `site_words` must have for this model."""
        return sum(m.dropout.num_sites for m in self.modules() if isinstance(m, TransformerBlock))

    def positions(self, tokens: Tensor, position_ids: Tensor | None, before: int = 0) -> Tensor:
        """position_ids [b or 1, s] of tokens [b, s], `before` of which are in a cache. Raises ValueError for too many tokens."""
        length = before + tokens.shape[1]
        if length > self.max_positions:
            raise ValueError(f"{length} tokens, but max_position_embeddings is {self.max_positions}")
        return torch.arange(before, length, device=tokens.device)[None] if position_ids is None else position_ids

    def rotary(self, position_ids: Tensor) -> Rotary | None:
        """The rotation of these positions; None where the model rotates nothing."""
        return None if self.rotary_tables is None else self.rotary_tables.at(position_ids)


def tied_weight(embedding: nn.Module, tied: bool) -> Tensor | None:
    """The word embeddings' weight, for an output layer that shares it."""
    return embedding.get_submodule("word_embeddings").get_parameter("weight") if tied else None
