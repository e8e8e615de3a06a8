"""GPT: embedding, causal stack, output layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.run import ModelConfig
from configs.transformer import TransformerConfig
from fusions.random import DropoutKeys
from models.embedding import LanguageModelEmbedding
from models.heads import LanguageModelHead
from models.layer_specs import GPTSpec
from models.rotary import RotaryTables
from models.tensor_parallel.params import TensorParallel
from models.transformer_block import TransformerBlock
from models.transformer_layer import DropoutContext


class GPTModel(nn.Module):
    """A decoder-only language model.

    Parameters are fp32; the computation runs in `compute_dtype`. At tensor-parallel size 1 it is an ordinary module and
    needs no process group.
    """

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        spec: GPTSpec,
        tp: TensorParallel | None = None,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        device, tp = torch.device(device), tp or TensorParallel()
        self.config, self.tp, self.device, self.compute_dtype = transformer, tp, device, compute_dtype
        self.max_positions = model.max_position_embeddings
        self.embedding = LanguageModelEmbedding(model, transformer, tp, device)
        self.decoder = TransformerBlock(transformer, spec.block, tp, device)
        self.output_layer = LanguageModelHead(model, transformer, spec.loss_function, spec.loss_from_hidden, tp, device)
        rope = model.position_embedding_type == "rope"
        self.rotary_tables = RotaryTables(model, transformer, device) if rope else None

    @property
    def num_dropout_sites(self) -> int:
        """Rows that `site_words` must have for this model."""
        return 1 + DropoutContext.SITES_PER_LAYER * self.config.num_layers

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        dropout_keys: DropoutKeys | None = None,
    ) -> Tensor:
        """The loss of each token, fp32 [b, s], with `labels`; without, vocabulary-parallel logits [s, b, v/t].

        tokens, position_ids, labels: int64 [b, s]; labels are already shifted, -100 is not counted. attention_mask:
        boolean [b, 1, s, s], True = masked out, combined with the causal mask. `dropout_keys` is needed for training with
        dropout at tensor-parallel size > 1; without it, masks come from torch's generator.
        """
        s = tokens.shape[1]
        if s > self.max_positions:
            raise ValueError(f"{s} tokens, but max_position_embeddings is {self.max_positions}")
        if position_ids is None:
            position_ids = torch.arange(s, device=tokens.device)[None]
        dropout = self._dropout_context(dropout_keys, s)
        embedding_key = dropout.hidden(0) if dropout is not None and self.config.hidden_dropout > 0 else None
        hidden = self.embedding(tokens, position_ids, self.compute_dtype, embedding_key)
        rotary = None if self.rotary_tables is None else self.rotary_tables.at(position_ids)
        hidden = self.decoder(hidden, attention_mask, rotary, dropout)
        tied_weight = self.embedding.word_embeddings.get_parameter("weight") if self.output_layer.tied else None
        if labels is None:
            return self.output_layer.logits(hidden, tied_weight)
        return self.output_layer.loss(hidden, tied_weight, labels)

    def _dropout_context(self, keys: DropoutKeys | None, seq_length: int) -> DropoutContext | None:
        config = self.config
        if not self.training or (config.hidden_dropout == 0 and config.attention_dropout == 0):
            return None
        if keys is None:
            if self.tp.size > 1:
                raise ValueError("training with dropout at tensor-parallel size > 1 needs dropout_keys, equal on all ranks")
            return None
        rows = seq_length // self.tp.size if self.tp.sequence_parallel else seq_length
        first_row = self.tp.rank * rows if self.tp.sequence_parallel else 0
        heads = config.num_attention_heads // self.tp.size
        device = keys.samples.device
        return DropoutContext(
            keys,
            torch.arange(first_row, first_row + rows, device=device),
            torch.arange(self.tp.rank * heads, (self.tp.rank + 1) * heads, device=device),
            seq_length,
        )
