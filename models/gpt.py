"""GPT: embedding, causal stack, output layer."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.model import ModelConfig
from configs.transformer import TransformerConfig
from fusions.random import DropoutKeys
from models.cache import KeyValueCache
from models.embedding import LanguageModelEmbedding
from models.heads import LanguageModelHead
from models.language_model import LanguageModel, tied_weight
from models.layer_specs import GPTSpec
from models.tensor_parallel.params import TensorParallel
from models.transformer_block import TransformerBlock
from models.transformer_layer import LayerInputs


class GPTModel(LanguageModel):
    """A decoder-only language model."""

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        spec: GPTSpec,
        tp: TensorParallel | None = None,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(model, transformer, tp, device, compute_dtype)
        self.embedding = LanguageModelEmbedding(model, transformer, self.tp, self.device)
        self.decoder = TransformerBlock(transformer, spec.block, self.tp, self.device)
        self.output_layer = LanguageModelHead(
            model, transformer, spec.loss_function, spec.loss_from_hidden, self.tp, self.device
        )

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        dropout_keys: DropoutKeys | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """The loss of each token, fp32 [b, s], with `labels`; without, vocabulary-parallel logits [s, b, v/t].

        tokens, position_ids, labels: int64 [b, s]; labels are already shifted, -100 is not counted. attention_mask:
        boolean [b, 1, 1 or s, s], True = masked out, combined with the causal mask. `dropout_keys` is needed for training with
        dropout at tensor-parallel size > 1; without it, masks come from torch's generator. With a `cache` the tokens are the
        next ones after those in it, and are put into it; the mask then speaks of all of them, [b, 1, 1 or s, cached + s].
        """
        position_ids = self.positions(tokens, position_ids, 0 if cache is None else cache.length)
        hidden = self.embedding(tokens, position_ids, self.compute_dtype)
        inputs = LayerInputs(attention_mask, self.rotary(position_ids))
        hidden = self.decoder(hidden, inputs, dropout_keys, tokens.shape[1], cache)
        weight = tied_weight(self.embedding, self.output_layer.tied)
        if labels is None:
            return self.output_layer.logits(hidden, weight)
        return self.output_layer.loss(hidden, weight, labels)
