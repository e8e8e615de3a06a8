"""BERT (Devlin et al. 2019, arXiv:1810.04805): embedding, a stack that looks both ways, a masked-LM head, a sentence head."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.model import ModelConfig
from configs.transformer import TransformerConfig
from fusions.random import DropoutKeys
from models.embedding import LanguageModelEmbedding
from models.heads import LanguageModelHead, MaskedLMTransform, SentenceHead
from models.language_model import LanguageModel, tied_weight
from models.layer_specs import BertSpec
from models.tensor_parallel.params import TensorParallel
from models.transformer_block import TransformerBlock
from models.transformer_layer import LayerInputs


class BertModel(LanguageModel):
    """An encoder. As BERT was, with `layernorm_position: post`; the embedding's norm is then the first layer's first norm."""

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        spec: BertSpec,
        tp: TensorParallel | None = None,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(model, transformer, tp, device, compute_dtype)
        tp, device = self.tp, self.device
        self.embedding = LanguageModelEmbedding(model, transformer, tp, device, model.num_token_types)
        self.encoder = TransformerBlock(transformer, spec.block, tp, device)
        self.lm_transform = MaskedLMTransform(transformer, spec.head_activation, spec.head_norm, tp, device)
        self.output_layer = LanguageModelHead(model, transformer, spec.loss_function, False, tp, device, has_bias=True)
        self.sentence_head = SentenceHead(transformer, tp, device) if model.sentence_head is not None else None

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        dropout_keys: DropoutKeys | None = None,
        token_types: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(loss of each token, fp32 [b, s], with `labels`, or without vocabulary-parallel logits [s, b, v/t]; logits of the
        sentence head, fp32 [b, 2], or None where there is none).

        tokens, token_types, position_ids, labels: int64 [b, s]; a label of -100 is not counted. attention_mask: boolean
        [b, 1, 1 or s, s], True = masked out: padding.
        """
        position_ids = self.positions(tokens, position_ids)
        hidden = self.embedding(tokens, position_ids, self.compute_dtype, token_types)
        inputs = LayerInputs(attention_mask, self.rotary(position_ids))
        hidden = self.encoder(hidden, inputs, dropout_keys, tokens.shape[1])
        sentence = None if self.sentence_head is None else self.sentence_head(hidden)
        weight = tied_weight(self.embedding, self.output_layer.tied)
        hidden = self.lm_transform(hidden)
        if labels is None:
            return self.output_layer.logits(hidden, weight), sentence
        return self.output_layer.loss(hidden, weight, labels), sentence
