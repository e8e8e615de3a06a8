"""T5 (Raffel et al. 2020, arXiv:1910.10683): an encoder, and a decoder that looks at its output; one embedding for both."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.model import ModelConfig
from configs.transformer import TransformerConfig
from fusions.random import DropoutKeys
from models.cache import KeyValueCache
from models.embedding import LanguageModelEmbedding, RelativePositionBias
from models.heads import LanguageModelHead
from models.language_model import LanguageModel, tied_weight
from models.layer_specs import T5Spec
from models.tensor_parallel.params import TensorParallel
from models.transformer_block import TransformerBlock
from models.transformer_layer import LayerInputs


class T5Model(LanguageModel):
    """An encoder and a decoder over the same kind of layer, each with its table of relative positions.

    Dropped is what is dropped in every model here: what enters a stack, attention weights, what each sub-block adds. (T5's own
    code also drops inside the MLP and after the last norm.)
    """

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        spec: T5Spec,
        tp: TensorParallel | None = None,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(model, transformer, tp, device, compute_dtype)
        tp, device = self.tp, self.device
        decoder = transformer.model_copy(update={"num_layers": model.decoder_num_layers or transformer.num_layers})
        self.embedding = LanguageModelEmbedding(model, transformer, tp, device)
        self.encoder_position_bias = RelativePositionBias(model, transformer, False, tp, device)
        self.encoder = TransformerBlock(transformer, spec.encoder, tp, device)
        self.decoder_position_bias = RelativePositionBias(model, transformer, True, tp, device)
        self.decoder = TransformerBlock(decoder, spec.decoder, tp, device, self.encoder.dropout.num_sites)
        self.output_layer = LanguageModelHead(model, transformer, spec.loss_function, spec.loss_from_hidden, tp, device)
        self.output_scale = transformer.hidden_size**-0.5 if model.scale_decoder_outputs else 1.0

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        dropout_keys: DropoutKeys | None = None,
    ) -> Tensor:
        """The loss of each decoder token, fp32 [b, sd], with `labels`; without, vocabulary-parallel logits [sd, b, v/t].

        tokens int64 [b, s]; decoder_tokens, labels int64 [b, sd]: the labels moved one place on, and the labels themselves; -100
        is not counted. Masks: boolean, True = masked out: attention_mask [b, 1, 1, s] of the encoder's tokens, in both stacks;
        decoder_attention_mask [b, 1, 1 or sd, sd], combined with the causal mask.
        """
        context = self.encode(tokens, attention_mask, dropout_keys)
        return self.decode(decoder_tokens, context, attention_mask, decoder_attention_mask, labels, dropout_keys)

    def encode(self, tokens: Tensor, attention_mask: Tensor | None, dropout_keys: DropoutKeys | None = None) -> Tensor:
        """The encoder's output [s, b, h] (or [s/t, b, h])."""
        s = tokens.shape[1]
        hidden = self.embedding(tokens, self.positions(tokens, None), self.compute_dtype)
        inputs = LayerInputs(attention_mask, position_bias=self.encoder_position_bias(s, s, self.compute_dtype))
        return self.encoder(hidden, inputs, dropout_keys, s)

    def decode(
        self,
        tokens: Tensor,
        context: Tensor,
        context_mask: Tensor | None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        dropout_keys: DropoutKeys | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """As `forward`, from the encoder's output. With a `cache` the tokens are the next ones after those in it."""
        s, before = tokens.shape[1], 0 if cache is None else cache.length
        hidden = self.embedding(tokens, self.positions(tokens, None, before), self.compute_dtype)
        bias = self.decoder_position_bias(s, before + s, self.compute_dtype)
        inputs = LayerInputs(attention_mask, None, bias, context, context_mask)
        hidden = self.decoder(hidden, inputs, dropout_keys, s, cache)
        hidden = hidden if self.output_scale == 1.0 else hidden * self.output_scale
        weight = tied_weight(self.embedding, self.output_layer.tied)
        if labels is None:
            return self.output_layer.logits(hidden, weight)
        return self.output_layer.loss(hidden, weight, labels)
