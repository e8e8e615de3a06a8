"""From hidden states to logits and losses; those of a language model are split over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.model import ModelConfig
from configs.transformer import TransformerConfig
from fusions import fused_linear_wgrad
from models.init import constant, normal
from models.norm import Norm
from models.spec import ModuleSpec, build_module
from models.tensor_parallel import regions
from models.tensor_parallel.layers import gather_for_columns, product_of_columns
from models.tensor_parallel.params import ParallelModule, TensorParallel, local_tensor


class LanguageModelHead(ParallelModule):
    """hidden [s, b, h] (or [s/t, b, h]) -> logits [s, b, v/t], or the loss of each token [b, s].

    `tied_weight` is the embedding's parameter where the two share it. `loss_function` comes from the fusion plan: of (logits,
    labels), or, `loss_from_hidden`, of (hidden, weight, labels). `has_bias`: one more number per token of the vocabulary.
    """

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        loss_function: Callable[..., Tensor],
        loss_from_hidden: bool,
        tp: TensorParallel,
        device: torch.device,
        has_bias: bool = False,
    ):
        super().__init__(tp, device)
        assert not (loss_from_hidden and has_bias), "the loss from hidden states knows no bias; configs refuse it"
        self.vocab_size, self.padded_vocab_size = model.vocab_size, model.padded_vocab_size
        self.loss_function = loss_function
        self.loss = self._loss_from_hidden if loss_from_hidden else self._loss_from_logits
        self.tied = model.share_embeddings_and_output_weights
        if not self.tied:
            shape = (model.padded_vocab_size, transformer.hidden_size)
            self.add_parameter("weight", shape, normal(transformer.init_method_std), shard_dim=0)
        self.has_bias = has_bias
        if has_bias:
            self.add_parameter("bias", (model.padded_vocab_size,), constant(0.0), shard_dim=0)

    def logits(self, hidden: Tensor, tied_weight: Tensor | None) -> Tensor:
        """[s, b, v/t]; columns at or beyond vocab_size are padding."""
        weight = self._weight(hidden.dtype, tied_weight)
        bias = self.local("bias", hidden.dtype) if self.has_bias else None
        if self.tp.group is None:
            return F.linear(hidden, weight, bias)
        logits = product_of_columns(fused_linear_wgrad.reference, hidden, weight, None, self.tp)
        return logits if bias is None else logits + bias

    def _weight(self, dtype: torch.dtype, tied_weight: Tensor | None) -> Tensor:
        return local_tensor(self.get_parameter("weight") if tied_weight is None else tied_weight).to(dtype)

    def _loss_from_hidden(self, hidden: Tensor, tied_weight: Tensor | None, labels: Tensor) -> Tensor:
        """Cross entropy fp32 [b, s] of labels [b, s]; all the logits never exist."""
        whole, weight = gather_for_columns(hidden, self.tp), self._weight(hidden.dtype, tied_weight)
        return _own(self.loss_function(whole, weight, labels.t(), self.tp.group, vocab_size=self.vocab_size))

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
        return _own(self.loss_function(logits, labels.t(), self.tp.group, vocab_size=self.vocab_size))


def _own(losses: Tensor) -> Tensor:
    """[s, b] -> [b, s], no view: fully_shard warns of a model that returns one."""
    return losses.t().clone()


class MaskedLMTransform(ParallelModule):
    """hidden [s, b, h] (or [s/t, b, h]) -> the same shape: a product, its bias and activation, a norm. Whole on every rank."""

    def __init__(
        self,
        config: TransformerConfig,
        bias_activation: Callable[..., Tensor],
        norm: ModuleSpec,
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__(tp, device)
        h = config.hidden_size
        self.bias_activation = bias_activation
        self.add_parameter("weight", (h, h), normal(config.init_method_std), on_sharded_tokens=tp.sequence_parallel)
        self.add_parameter("bias", (h,), constant(0.0), on_sharded_tokens=tp.sequence_parallel)
        self.norm: Norm = build_module(norm, config, tp=tp, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """norm(activation(hidden W^T + bias))."""
        weight, bias = (self.local(name, hidden.dtype) for name in ("weight", "bias"))
        return self.norm(self.bias_activation(F.linear(hidden, weight), bias))


class SentenceHead(ParallelModule):
    """hidden [s, b, h] (or [s/t, b, h]) -> fp32 [b, 2]: two classes, from the first token's hidden state (the pooler, then a
    linear layer)."""

    def __init__(self, config: TransformerConfig, tp: TensorParallel, device: torch.device):
        super().__init__(tp, device)
        h, std = config.hidden_size, config.init_method_std
        self.add_parameter("pooler_weight", (h, h), normal(std))
        self.add_parameter("pooler_bias", (h,), constant(0.0))
        self.add_parameter("weight", (2, h), normal(std))
        self.add_parameter("bias", (2,), constant(0.0))

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of both classes, the same on every rank."""
        first = hidden[0]
        if self.tp.sequence_parallel:  # only the first rank has the first token; the others add nothing to the sum
            first = regions.reduce_from_tensor_parallel_region(first * float(self.tp.rank == 0), self.tp.group)
        pooler_weight, pooler_bias, weight, bias = (
            self.local(name, first.dtype) for name in ("pooler_weight", "pooler_bias", "weight", "bias")
        )
        return F.linear(torch.tanh(F.linear(first, pooler_weight, pooler_bias)), weight, bias).float()
