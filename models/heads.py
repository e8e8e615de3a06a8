"""From hidden states to logits and loss, both split over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from configs.run import ModelConfig
from configs.transformer import TransformerConfig
from models.init import normal
from models.tensor_parallel.layers import column_parallel_product
from models.tensor_parallel.params import ParallelModule, TensorParallel, local_tensor


class LanguageModelHead(ParallelModule):
    """hidden [s, b, h] (or [s/t, b, h]) -> logits [s, b, v/t], or the loss of each token [b, s].

    `tied_weight` is the embedding's parameter where the two share it. `loss_function` comes from the fusion plan.
    """

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        loss_function: Callable[..., Tensor],
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__(tp, device)
        self.vocab_size, self.padded_vocab_size = model.vocab_size, model.padded_vocab_size
        self.loss_function = loss_function
        self.tied = model.share_embeddings_and_output_weights
        if not self.tied:
            shape = (model.padded_vocab_size, transformer.hidden_size)
            self.add_parameter("weight", shape, normal(transformer.init_method_std), shard_dim=0)

    def logits(self, hidden: Tensor, tied_weight: Tensor | None) -> Tensor:
        """[s, b, v/t]; columns at or beyond vocab_size are padding."""
        weight = self.get_parameter("weight") if tied_weight is None else tied_weight
        return column_parallel_product(hidden, local_tensor(weight).to(hidden.dtype), self.tp)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy fp32 [b, s] of logits [s, b, v/t] and labels [b, s]."""
        if logits.shape[-1] * self.tp.size != self.padded_vocab_size:
            raise ValueError(
                f"logits have {logits.shape[-1]} columns on each of {self.tp.size} ranks; expected this rank's slice of "
                f"{self.padded_vocab_size // self.tp.size}. Gathered logits would be counted once per rank"
            )
        return self.loss_function(logits, labels.t(), self.tp.group, vocab_size=self.vocab_size).t()
