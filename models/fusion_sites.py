"""The fusion sites of a model, with the facts of each. Imports no torch, so that explain.py can show a plan at once.

A site's name says where it is; of T5's two stacks, which one comes first: `encoder.mlp`, `decoder.cross_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.model import rotary_dim
from configs.run import RunConfig
from configs.transformer import TransformerConfig
from fusions.catalogue import OPERATIONS
from fusions.machine import Machine
from fusions.registry import REFERENCE, Facts, FusionPlan, Request, resolve

Times = dict[str, dict[str, float]]
ENCODER, DECODER = "encoder.", "decoder."
OUTPUT, LM_TRANSFORM = "output_layer", "lm_transform"
CROSS_ATTENTION_RESIDUAL, MLP_RESIDUAL = "cross_attn_bda + pre_mlp_layernorm", "mlp_bda + output_layernorm"
OPTIMIZER_FLAG = "optimizer.fusion"


def fusion_plan(config: RunConfig, machine: Machine, times: Times | None = None) -> FusionPlan:
    """Decide every fusion flag at every site of the configured model. `times` is what `auto` decides by.

    Raises FusionError where a fusion is required and can't run.
    """
    return resolve(fusion_requests(config, machine, times), config.transformer.strict_fusions, times)


def fusion_requests(config: RunConfig, machine: Machine, times: Times | None = None) -> list[Request]:
    """One request per (flag, site kind) of the configured model."""
    requests: list[Request] = []
    for stack in stacks(config):
        site = _StackSites(config, machine, stack)
        residual = site.residual_norms()
        decided = resolve(residual, times=times, required=False).decisions
        fused = {d.site for d in decided if d.runs != REFERENCE}
        requests += [*residual, *site.residuals_and_norms(fused), *site.mlp(), *site.attention(), *site.linears()]
    ends = _EndSites(config, machine)
    return [*requests, *ends.lm_transform(), ends.output(), ends.optimizer()]


def self_attention_residual(cross_attention: bool) -> str:
    """The site of the add after self-attention and the norm that follows."""
    return f"self_attn_bda + {'pre_cross_attn_layernorm' if cross_attention else 'pre_mlp_layernorm'}"


@dataclass(frozen=True)
class Stack:
    """One stack of a model: what its sites' names start with, its tokens, and how it attends."""

    name: str
    seq_length: int
    num_layers: int
    causal: bool
    padded: bool  # whether its batches come with a mask
    context_length: int | None = None  # tokens that cross-attention looks at; None: there is none


def stacks(config: RunConfig) -> list[Stack]:
    """The stacks of the configured family, in the order they run."""
    s, layers = config.data.seq_length, config.transformer.num_layers
    if config.model.family == "gpt":
        return [Stack("", s, layers, causal=True, padded=config.data.reset_attention_mask)]
    if config.model.family == "bert":
        return [Stack("", s, layers, causal=False, padded=True)]
    decoder = config.model.decoder_num_layers or layers
    return [
        Stack(ENCODER, s, layers, causal=False, padded=True),
        Stack(DECODER, config.data.decoder_seq_length or s, decoder, causal=True, padded=False, context_length=s),
    ]


def activation_operation(tf: TransformerConfig) -> str:
    """The operation of the configured activation."""
    gated = {"swiglu": "bias_swiglu", "geglu": "bias_geglu", "quick_geglu": "bias_geglu"}
    return gated.get(tf.activation) or ("squared_relu" if tf.activation == "squared_relu" else "bias_gelu")


def head_activation(tf: TransformerConfig) -> str:
    """The activation of BERT's masked-LM head: the layers', without its gate; ReLU for squared ReLU."""
    plain = {"swiglu": "silu", "geglu": "gelu_tanh", "quick_geglu": "quick_gelu", "squared_relu": "relu"}
    return plain.get(tf.activation, tf.activation)


class _Sites:
    """Builds requests; shapes are those of one rank."""

    def __init__(self, config: RunConfig, machine: Machine, stack: str, seq_length: int):
        self.config, self.machine, self.tf, self.stack = config, machine, config.transformer, stack
        self.t, self.s, self.b = config.parallel.tensor_parallel_size, seq_length, config.training.micro_batch_size
        rows = self.s // self.t if config.parallel.sequence_parallel else self.s
        self.hidden = (rows, self.b, self.tf.hidden_size)

    def request(
        self,
        flag: str,
        site: str,
        operation: str,
        shape: tuple[int, ...],
        *,
        idle: str = "",
        asked: Any = None,
        **options: Any,
    ) -> Request:
        """`idle`: why the flag can't matter here; `asked` overrides the configured value."""
        facts = Facts(
            self.machine,
            self.config.training.precision,
            self.t,
            self.config.parallel.sequence_parallel,
            shape,
            tuple(options.items()),
        )
        value = getattr(self.tf, flag) if asked is None else asked
        return Request(flag, self.stack + site, OPERATIONS[operation], value, facts, idle)

    def norm(self, site: str, idle: str = "") -> Request:
        """A norm by itself."""
        kind = "layer_norm" if self.tf.normalization == "LayerNorm" else "rms_norm"
        native = kind == "layer_norm" and self.machine.device == "cpu" and not self.tf.memory_efficient_layer_norm
        own = "on a CPU PyTorch's own LayerNorm is one pass already, and runs either way" if native else ""
        options: dict[str, Any] = {"affine": True, "memory_efficient": self.tf.memory_efficient_layer_norm}
        return self.request("persist_layer_norm", site, kind, self.hidden, idle=idle or own, **options)


class _StackSites(_Sites):
    """The sites of one stack."""

    def __init__(self, config: RunConfig, machine: Machine, stack: Stack):
        super().__init__(config, machine, stack.name, stack.seq_length)
        self.causal, self.padded, self.context_length = stack.causal, stack.padded, stack.context_length
        self.cross = stack.context_length is not None
        self.attention_residual = self_attention_residual(self.cross)

    def residual_norms(self) -> list[Request]:
        """The adds together with the norms after them."""
        options: dict[str, Any] = {
            "bias": self.tf.add_bias_linear,
            "dropout": self.tf.hidden_dropout,
            "normalization": self.tf.normalization,
        }
        sites = [self.attention_residual, *([CROSS_ATTENTION_RESIDUAL] if self.cross else []), MLP_RESIDUAL]
        return [self.request("residual_norm_fusion", site, "residual_norm", self.hidden, **options) for site in sites]

    def residuals_and_norms(self, fused: set[str]) -> list[Request]:
        """The adds and the norms by themselves; those that are part of a fused site have no say."""
        add: dict[str, Any] = {"bias": self.tf.add_bias_linear, "dropout": self.tf.hidden_dropout}

        def done(site: str) -> str:
            return "residual_norm_fusion does it" if self.stack + site in fused else ""

        def bda(site: str, part_of: str) -> Request:
            flag, operation = "bias_dropout_fusion", "bias_dropout_add"
            return self.request(flag, site, operation, self.hidden, idle=done(part_of), **add)

        after_mlp, after_cross = done(MLP_RESIDUAL), done(CROSS_ATTENTION_RESIDUAL)
        before_mlp = after_cross if self.cross else done(self.attention_residual)
        return [
            bda("self_attn_bda", self.attention_residual),
            *([bda("cross_attn_bda", CROSS_ATTENTION_RESIDUAL)] if self.cross else []),
            bda("mlp_bda", MLP_RESIDUAL),
            self.norm("input_layernorm"),
            *([self.norm("pre_cross_attn_layernorm", done(self.attention_residual))] if self.cross else []),
            self.norm("pre_mlp_layernorm", before_mlp),
            self.norm("output_layernorm", after_mlp),
        ]

    def mlp(self) -> list[Request]:
        """The activation, which belongs to one of two flags; the other is only mentioned if it is set."""
        tf, operation = self.tf, activation_operation(self.tf)
        inner = (self.s, self.b, tf.ffn_size // self.t * (2 if tf.gated else 1))
        options: dict[str, Any] = {"bias": tf.add_bias_linear, "activation": tf.activation}
        if tf.gated:
            act = {"geglu": "gelu_tanh", "quick_geglu": "quick_gelu"}.get(tf.activation)
            options |= {"act": act, "clamp": tf.activation_func_clamp_value, "offset": tf.glu_linear_offset}
            options["fp8_input_store"] = tf.activation_func_fp8_input_store
        owner = "use_fused_weighted_squared_relu" if operation == "squared_relu" else "bias_activation_fusion"
        requests = [self.request(owner, "mlp", operation, inner, **options)]
        for flag in ("bias_activation_fusion", "use_fused_weighted_squared_relu"):
            if flag != owner and getattr(tf, flag) is not False:
                idle = f"activation {tf.activation} has {owner}"
                requests.append(self.request(flag, "mlp", operation, inner, idle=idle, **options))
        return requests

    def attention(self) -> list[Request]:
        """The softmaxes, and the rotation of queries and keys."""
        tf, model = self.tf, self.config.model
        n, g, d = tf.num_attention_heads // self.t, tf.query_groups // self.t, tf.head_size
        softmaxes = [self._softmax("self_attention", self.s, self.causal, self.padded)]
        if self.context_length is not None:
            softmaxes.append(self._softmax("cross_attention", self.context_length, False, True))
        rope = model.position_embedding_type == "rope"
        packed = tf.fused_single_qkv_rope
        magnitude = 1.0 if model.rope_scaling is None or model.rope_scaling.type != "yarn" else "yarn's"
        rotary = self.request(
            "apply_rope_fusion",
            "self_attention",
            "qkv_rope" if packed else "rope",
            (self.s, self.b, g, (n // g + 2) * d) if packed else (self.s, self.b, n, d),
            idle="" if rope else f"position_embedding_type is {model.position_embedding_type}",
            head_dim=d,
            rotary_dim=rotary_dim(model, tf) if rope else d,
            interleaved=model.rotary_interleaved,
            positions_per_sample=self.config.data.reset_position_ids,
            qk_bias=tf.has_qkv_bias,
            magnitude=magnitude,
        )
        return [*softmaxes, rotary]

    def _softmax(self, site: str, keys: int, causal: bool, mask: bool) -> Request:
        tf, flag, operation = self.tf, "masked_softmax_fusion", "scale_mask_softmax"
        sdpa = "attention_backend sdpa computes the softmax inside its own kernel" if tf.attention_backend == "sdpa" else ""
        options = {"causal": causal, "window": tf.window_size, "dropout": tf.attention_dropout, "sink": tf.softmax_type}
        shape = (self.b, tf.num_attention_heads // self.t, self.s, keys)
        return self.request(flag, site, operation, shape, idle=sdpa, **options, mask=mask)

    def linears(self) -> list[Request]:
        """The weight gradients of the linear layers."""
        tf, request = self.tf, self._linear
        n, g, d = tf.num_attention_heads, tf.query_groups, tf.head_size
        cross = [
            request("linear_q", tf.hidden_size, n * d // self.t),
            request("linear_kv", tf.hidden_size, 2 * g * d // self.t, rows=self.context_length),
            request("cross_linear_proj", n * d // self.t, tf.hidden_size),
        ]
        return [
            *(cross if self.cross else []),
            request("linear_qkv", tf.hidden_size, (n + 2 * g) * d // self.t),
            request("linear_proj", n * d // self.t, tf.hidden_size),
            request("linear_fc1", tf.hidden_size, tf.ffn_size // self.t * (2 if tf.gated else 1), gated=tf.gated),
            request("linear_fc2", tf.ffn_size // self.t, tf.hidden_size),
        ]

    def _linear(self, site: str, inputs: int, outputs: int, gated: bool = False, rows: int | None = None) -> Request:
        idle = "the halves of a gated weight are not stored as its product has them" if gated else ""
        shape, dp = (rows or self.s, self.b, outputs), self.config.parallel.data_parallel
        return self.request(
            "gradient_accumulation_fusion", site, "linear_wgrad", shape, idle=idle, inputs=inputs, data_parallel=dp
        )


class _EndSites(_Sites):
    """What comes after the last stack."""

    def __init__(self, config: RunConfig, machine: Machine):
        super().__init__(config, machine, "", stacks(config)[-1].seq_length)

    def lm_transform(self) -> list[Request]:
        """The activation and the norm of BERT's masked-LM head."""
        if self.config.model.family != "bert":
            return []
        options: dict[str, Any] = {"bias": True, "activation": head_activation(self.tf)}
        activation = self.request("bias_activation_fusion", LM_TRANSFORM, "bias_gelu", self.hidden, **options)
        return [activation, self.norm(LM_TRANSFORM)]

    def output(self) -> Request:
        """The loss, from logits or from hidden states."""
        tf, model = self.tf, self.config.model
        linear = tf.cross_entropy_fusion_impl == "linear"
        asked = tf.cross_entropy_loss_fusion
        if tf.cross_entropy_fusion_impl == "transformer_engine" and asked is True:
            asked = "transformer_engine"
        last_rank_padding = model.padded_vocab_size - model.vocab_size
        return self.request(
            "cross_entropy_loss_fusion",
            OUTPUT,
            "linear_cross_entropy" if linear else "cross_entropy",
            (self.s, self.b, model.padded_vocab_size // self.t),
            asked=asked,
            padding=min(last_rank_padding, model.padded_vocab_size // self.t - 1),
            hidden=tf.hidden_size,
            z_loss=0.0,
            label_smoothing=0.0,
            soft_cap=None,
        )

    def optimizer(self) -> Request:
        """AdamW, judged by the matrices of one layer."""
        asked, elements = self.config.optimizer.fusion, 12 * self.tf.hidden_size**2 // self.t
        return self.request(OPTIMIZER_FLAG, "optimizer", "adamw", (elements,), asked=asked)
