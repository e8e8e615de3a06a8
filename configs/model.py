"""ModelConfig: what is around the transformer stack."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from configs.section import Float, NonNegativeInt, PositiveFloat, PositiveInt, Section
from configs.transformer import TransformerConfig


class RopeScaling(Section):
    """How rotary frequencies are stretched to contexts longer than those of the original training."""

    type: Literal["linear", "llama3", "yarn"] = Field(description="Rule; as in Hugging Face's rope_type.")
    factor: PositiveFloat = Field(description="New context length / original one.")
    original_max_position_embeddings: PositiveInt | None = Field(
        None, description="Context length of the original training; needed by llama3 and yarn."
    )
    low_freq_factor: PositiveFloat = Field(1.0, description="llama3: wavelengths above original / this are stretched.")
    high_freq_factor: PositiveFloat = Field(4.0, description="llama3: wavelengths below original / this stay.")
    beta_fast: PositiveFloat = Field(32.0, description="yarn: dimensions that turn more often than this stay.")
    beta_slow: PositiveFloat = Field(1.0, description="yarn: dimensions that turn less often than this are stretched.")
    attention_factor: PositiveFloat | None = Field(
        None, description="yarn: factor on cos and sin; 0.1 ln(factor) + 1 when null."
    )


class ModelConfig(Section):
    """What is around the transformer stack: vocabulary, positions, output."""

    family: Literal["gpt", "bert", "t5"] = Field("gpt", description="Decoder; encoder; encoder and decoder.")
    vocab_size: PositiveInt = Field(description="Tokens of the tokenizer; ids are below it.")
    max_position_embeddings: PositiveInt = Field(description="Longest sequence the model has positions for (tokens).")
    position_embedding_type: Literal["learned_absolute", "rope", "relative"] = Field(
        "learned_absolute", description="Positions: a vector each; rotated queries and keys; T5's bias per distance."
    )
    relative_attention_num_buckets: PositiveInt = Field(32, description="relative: distances that have a bias of their own.")
    relative_attention_max_distance: PositiveInt = Field(128, description="relative: all distances from here on share one.")
    rotary_base: PositiveFloat = Field(10000.0, description="Base of the rotary frequencies.")
    rotary_percent: Float = Field(1.0, gt=0, le=1, description="Fraction of each head that is rotated.")
    rotary_interleaved: bool = Field(False, description="Pair (0,1),(2,3)… (true) or (0,d/2),(1,d/2+1)… (false).")
    rope_scaling: RopeScaling | None = Field(None, description="Stretching of the rotary frequencies; null: none.")
    share_embeddings_and_output_weights: bool = Field(True, description="The output layer uses the embedding's weight.")
    decoder_num_layers: PositiveInt | None = Field(None, description="t5: layers of the decoder; num_layers when null.")
    scale_decoder_outputs: bool = Field(
        False,
        description="t5: hidden states times hidden_size^-0.5 before the output layer, as T5 v1.0 does with its tied one.",
    )
    num_token_types: NonNegativeInt = Field(2, description="bert: kinds of segments that are embedded; 0: none.")
    sentence_head: Literal["next_sentence", "sentence_order"] | None = Field(
        None,
        description="bert: second loss over pairs of segments: is the second from elsewhere; are the two swapped; null: none.",
    )
    make_vocab_size_divisible_by: PositiveInt = Field(
        128, description="The vocabulary is padded to a multiple of this; padding never takes part in the loss."
    )

    @property
    def padded_vocab_size(self) -> int:
        """vocab_size rounded up; independent of the parallel sizes, so checkpoints move between them."""
        multiple = self.make_vocab_size_divisible_by
        return math.ceil(self.vocab_size / multiple) * multiple


def rotary_dim(model: ModelConfig, transformer: TransformerConfig) -> int:
    """Dimensions of a head that are rotated."""
    return int(transformer.head_size * model.rotary_percent)
