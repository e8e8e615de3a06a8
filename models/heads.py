"""From hidden states to logits and loss, both split over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.run import ModelConfig
from configs.transformer import TransformerConfig
from models.init import normal
from models.tensor_parallel.layers import gather_for_columns
from models.tensor_parallel.params import ParallelModule, TensorParallel, local_tensor


class LanguageModelHead(ParallelModule):
    """hidden [s, b, h] (or [s/t, b, h]) -> logits [s, b, v/t], or the loss of each token [b, s].

    `tied_weight` is the embedding's parameter where the two share it. `loss_function` comes from the fusion plan: of (logits,
    labels), or, `loss_from_hidden`, of (hidden, weight, labels).
    """

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        loss_function: Callable[..., Tensor],
        loss_from_hidden: bool,
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__(tp, device)
        self.vocab_size, self.padded_vocab_size = model.vocab_size, model.padded_vocab_size
        self.loss_function = loss_function
        self.loss = self._loss_from_hidden if loss_from_hidden else self._loss_from_logits
        self.tied = model.share_embeddings_and_output_weights
        if not self.tied:
            shape = (model.padded_vocab_size, transformer.hidden_size)
            self.add_parameter("weight", shape, normal(transformer.init_method_std), shard_dim=0)

    def logits(self, hidden: Tensor, tied_weight: Tensor | None) -> Tensor:
        """[s, b, v/t]; columns at or beyond vocab_size are padding."""
        return F.linear(gather_for_columns(hidden, self.tp), self._weight(hidden.dtype, tied_weight))

    def _weight(self, dtype: torch.dtype, tied_weight: Tensor | None) -> Tensor:
        return local_tensor(self.get_parameter("weight") if tied_weight is None else tied_weight).to(dtype)

    def _loss_from_hidden(self, hidden: Tensor, tied_weight: Tensor | None, labels: Tensor) -> Tensor:
        """Cross entropy fp32 [b, s] of labels [b, s]; all the logits never exist."""
        whole, weight = gather_for_columns(hidden, self.tp), self._weight(hidden.dtype, tied_weight)
        return self.loss_function(whole, weight, labels.t(), self.tp.group, vocab_size=self.vocab_size).t()

    def _loss_from_logits(self, hidden: Tensor, tied_weight: Tensor | None, labels: Tensor) -> Tensor:
        """Cross entropy fp32 [b, s] of labels [b, s], by way of the logits."""
        return self.loss_of_logits(self.logits(hidden, tied_weight), labels)

    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy fp32 [b, s] of logits [s, b, v/t] and labels [b, s]."""
        if logits.shape[-1] * self.tp.size != self.padded_vocab_size:
            raise ValueError(
                f"logits have {logits.shape[-1]} columns on each of {self.tp.size} ranks; expected this rank's slice of "
                f"{self.padded_vocab_size // self.tp.size}. Gathered logits would be counted once per rank"
            )
        return self.loss_function(logits, labels.t(), self.tp.group, vocab_size=self.vocab_size).t()
