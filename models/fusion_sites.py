"""The fusion sites of a model, with the facts of each. Imports no torch, so that explain.py can show a plan at once."""

from __future__ import annotations

from configs.run import RunConfig
from fusions.catalogue import FUSIONS
from fusions.machine import Machine
from fusions.registry import Facts, FusionPlan, Request, resolve


def fusion_plan(config: RunConfig, machine: Machine) -> FusionPlan:
    """Decide every fusion flag at every site of the configured model. Raises FusionError where one is required and can't run."""
    return resolve(fusion_requests(config, machine), config.transformer.strict_fusions)


def fusion_requests(config: RunConfig, machine: Machine) -> list[Request]:
    """One request per (flag, site kind) of a GPT."""
    tf, t = config.transformer, config.parallel.tensor_parallel_size
    s, b = config.data.seq_length, config.training.micro_batch_size
    rows = s // t if config.parallel.sequence_parallel else s
    hidden, inner = (rows, b, tf.hidden_size), (s, b, tf.ffn_size // t)
    scores = (b, tf.num_attention_heads // t, s, s)
    logits = (s, b, config.model.padded_vocab_size // t)
    norm = "layer_norm" if tf.normalization == "LayerNorm" else "rms_norm"
    sdpa = "attention_backend sdpa computes the softmax inside its own kernel" if tf.attention_backend == "sdpa" else ""
    bias, drop = ("bias", tf.add_bias_linear), ("dropout", tf.hidden_dropout)

    def request(
        flag: str, site: str, operation: str, shape: tuple[int, ...], *options: tuple[str, object], idle: str = ""
    ) -> Request:
        facts = Facts(machine, config.training.precision, t, config.parallel.sequence_parallel, shape, options)
        return Request(FUSIONS[flag], site, operation, getattr(tf, flag), facts, idle)

    return [
        request("bias_dropout_fusion", "self_attn_bda", "bias_dropout_add", hidden, bias, drop),
        request("bias_dropout_fusion", "mlp_bda", "bias_dropout_add", hidden, bias, drop),
        request("bias_activation_fusion", "mlp", "bias_activation", inner, bias, ("activation", tf.activation)),
        request(
            "masked_softmax_fusion",
            "self_attention",
            "scale_mask_softmax",
            scores,
            ("causal", True),
            ("window", tf.window_size),
            ("dropout", tf.attention_dropout),
            idle=sdpa,
        ),
        request("persist_layer_norm", "input_layernorm", norm, hidden),
        request("persist_layer_norm", "pre_mlp_layernorm", norm, hidden),
        request("persist_layer_norm", "final_layernorm", norm, hidden),
        request("cross_entropy_loss_fusion", "output_layer", "cross_entropy", logits),
    ]
