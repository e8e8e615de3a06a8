"""TransformerConfig: the shape of a layer, and the fusion flags."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.section import Float, PositiveFloat, PositiveInt, Probability, Problem, Section

FusionValue = bool | Literal["auto", "compile", "triton", "apex", "transformer_engine", "addmm", "torch"]
FUSION_FLAGS = (
    "bias_dropout_fusion",
    "residual_norm_fusion",
    "bias_activation_fusion",
    "use_fused_weighted_squared_relu",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
)
GATED = ("swiglu", "geglu", "quick_geglu")


def fusion_flag(description: str, default: bool = False) -> FusionValue:
    """The field of a fusion flag."""
    return Field(
        default,
        description=description + " false: the plain PyTorch reference; true: the first backend without an obstacle, "
        "else the reference with the reasons recorded; a backend's name: that backend or an error; auto: the fastest backend "
        "on this run's shapes, measured when the job first starts here.",
    )


class TransformerConfig(Section):
    """One transformer layer and the stack of them. Sizes are global, before any sharding."""

    num_layers: PositiveInt = Field(description="Transformer layers.")
    hidden_size: PositiveInt = Field(description="Width of the residual stream, h.")
    num_attention_heads: PositiveInt = Field(description="Query heads, n.")
    ffn_hidden_size: PositiveInt | None = Field(None, description="Inner width of the MLP, f; 4 h when null.")
    num_query_groups: PositiveInt | None = Field(
        None, description="Key/value heads, g (grouped-query attention); equal to num_attention_heads when null."
    )
    head_dim: PositiveInt | None = Field(None, description="Width of one head, d; h / n when null.")

    hidden_dropout: Probability = Field(0.1, description="Probability that an element of a sub-block's output is 0.")
    attention_dropout: Probability = Field(0.1, description="Probability that an attention weight is set to 0.")
    activation: Literal[
        "gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "squared_relu", "swiglu", "geglu", "quick_geglu"
    ] = Field(
        "gelu",
        description="gelu: erf form; gelu_tanh: tanh form; quick_gelu: x * sigmoid(1.702 x); swiglu, geglu (tanh form) and "
        "quick_geglu gate: the first half of 2 f inner dimensions, activated, times the second.",
    )
    activation_func_clamp_value: PositiveFloat | None = Field(
        None, description="c of a gated activation: gate at most c, linear half in [-c, c], after the bias; null: none."
    )
    glu_linear_offset: Float = Field(0.0, description="Added to the linear half of geglu and quick_geglu.")
    activation_func_fp8_input_store: bool = Field(
        False, description="A fused gated activation saves its input for the backward in fp8 (e4m3): 1 byte per element."
    )
    add_bias_linear: bool = Field(True, description="Biases in the linear layers.")
    add_qkv_bias: bool = Field(
        False, description="A bias in the product for q, k and v, where add_bias_linear is false (Qwen2)."
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = Field("LayerNorm", description="Kind of every norm.")
    layernorm_epsilon: PositiveFloat = Field(1e-5, description="Added to the variance (or mean square) of a norm.")
    layernorm_zero_centered_gamma: bool = Field(False, description="Store gamma - 1, so that weight decay pulls to 1.")
    layernorm_position: Literal["pre", "post"] = Field(
        "pre", description="pre: norms stand before their sub-block; post: after its residual add, as in BERT."
    )
    init_method_std: PositiveFloat = Field(
        0.02, description="Standard deviation of the initial weights; output projections use std / sqrt(2 num_layers)."
    )

    attention_backend: Literal["unfused", "sdpa"] = Field(
        "unfused", description="unfused: scores, softmax and product apart; sdpa: PyTorch's scaled_dot_product_attention."
    )
    attention_scale: PositiveFloat | None = Field(None, description="Factor on q k^T; 1 / sqrt(d) when null (T5: 1.0).")
    attention_softmax_in_fp32: bool = Field(True, description="Softmax of half-precision scores in fp32.")
    apply_query_key_layer_scaling: bool = Field(
        False, description="Divide scores by the layer number before, multiply inside the softmax (range, not result)."
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = Field(
        "vanilla",
        description="One more term in the softmax's denominator: none; exp(0); exp of a parameter per head (attention sink).",
    )
    window_size: PositiveInt | None = Field(
        None, description="Keys that a query sees, its own position included (sliding window); null: all before it."
    )

    bias_dropout_fusion: FusionValue = fusion_flag("Bias + dropout + residual add as one operation.")
    residual_norm_fusion: FusionValue = fusion_flag("Bias + dropout + residual add and the norm after it as one operation.")
    bias_activation_fusion: FusionValue = fusion_flag("Bias + activation of the MLP as one operation.")
    use_fused_weighted_squared_relu: FusionValue = fusion_flag("Bias + squared ReLU of the MLP as one operation.")
    masked_softmax_fusion: FusionValue = fusion_flag("Scale + mask + softmax + attention dropout as one operation.")
    persist_layer_norm: FusionValue = fusion_flag("LayerNorm or RMSNorm as one operation.")
    memory_efficient_layer_norm: bool = Field(
        False, description="A fused norm saves its output instead of its input (which the next layer saves anyway)."
    )
    apply_rope_fusion: FusionValue = fusion_flag("Rotary embedding of queries and keys as one operation.")
    fused_single_qkv_rope: bool = Field(
        False, description="With apply_rope_fusion: bias, rotation and split of the packed QKV in one pass."
    )
    cross_entropy_loss_fusion: FusionValue = fusion_flag("Vocabulary-parallel cross entropy as one operation.")
    cross_entropy_fusion_impl: Literal["native", "linear", "transformer_engine"] = Field(
        "native",
        description="native: from logits; linear: with the output projection, a chunk of tokens at a time, so that all the "
        "logits never exist; transformer_engine: its kernel.",
    )
    gradient_accumulation_fusion: FusionValue = fusion_flag("Weight gradients added to the total by their own product.")
    strict_fusions: bool = Field(False, description="A fusion that falls back to the reference is an error.")

    @property
    def gated(self) -> bool:
        """Whether the activation has a gate, so that the first linear of the MLP is 2 f wide."""
        return self.activation in GATED

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the product for q, k and v has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def ffn_size(self) -> int:
        """f: the inner width of the MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def query_groups(self) -> int:
        """g: the number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """d: the width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def problems(self, tensor_parallel_size: int) -> list[Problem]:
        """Every conflict inside this section and with the tensor-parallel size."""
        t, n, g, h, f = (
            tensor_parallel_size,
            self.num_attention_heads,
            self.query_groups,
            self.hidden_size,
            self.ffn_size,
        )
        found: list[Problem] = []

        def check(ok: bool, key: str, text: str) -> None:
            if not ok:
                found.append(Problem(f"transformer.{key}", text))

        check(
            self.head_dim is not None or h % n == 0,
            "num_attention_heads",
            f"hidden_size {h} is not divisible by num_attention_heads {n}; change one of them or set head_dim",
        )
        check(
            n % g == 0,
            "num_query_groups",
            f"num_attention_heads {n} is not divisible by num_query_groups {g}; each group serves the same number of heads",
        )
        for key, value in (("num_attention_heads", n), ("num_query_groups", g), ("ffn_hidden_size", f)):
            check(
                value % t == 0,
                key,
                f"{key} {value} is not divisible by parallel.tensor_parallel_size {t} "
                f"(num_attention_heads {n}, num_query_groups {g}, ffn_hidden_size {f}); each rank holds an equal share",
            )
        check(
            self.attention_backend != "sdpa" or self.attention_dropout == 0,
            "attention_dropout",
            f"is {self.attention_dropout} with attention_backend sdpa, which draws masks of its own that differ by machine "
            "and by parallel size; set attention_dropout=0.0 or attention_backend=unfused",
        )
        check(
            self.attention_softmax_in_fp32 or not self.apply_query_key_layer_scaling,
            "attention_softmax_in_fp32",
            "is false with apply_query_key_layer_scaling, whose second half must happen in fp32; set it to true",
        )
        check(
            self.attention_backend != "sdpa" or self.softmax_type == "vanilla",
            "softmax_type",
            f"is {self.softmax_type} with attention_backend sdpa, whose kernel has no such term; use unfused",
        )
        check(
            self.gated or self.activation_func_clamp_value is None,
            "activation_func_clamp_value",
            f"clamps the two halves of a gated activation, but activation is {self.activation}; set it to null",
        )
        check(
            self.activation in ("geglu", "quick_geglu") or self.glu_linear_offset == 0,
            "glu_linear_offset",
            f"is {self.glu_linear_offset}, but only geglu and quick_geglu have one; activation is {self.activation}",
        )
        check(
            self.gated or not self.activation_func_fp8_input_store,
            "activation_func_fp8_input_store",
            f"is true, but only gated activations store their input so; activation is {self.activation}",
        )
        check(
            self.cross_entropy_fusion_impl != "transformer_engine"
            or self.cross_entropy_loss_fusion in (False, True, "transformer_engine"),
            "cross_entropy_fusion_impl",
            f"is transformer_engine, but cross_entropy_loss_fusion asks for {self.cross_entropy_loss_fusion}; set it to true",
        )
        check(
            self.attention_backend != "sdpa" or not self.apply_query_key_layer_scaling,
            "apply_query_key_layer_scaling",
            "can't be applied under attention_backend sdpa, which keeps scores to itself; set it to false or use unfused",
        )
        return found
