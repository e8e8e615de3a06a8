"""A configuration -> the config.json of its HF model type. What that type has no counterpart for is refused by its name.

The proof is the way back: the config.json that is written, read again, must describe the same model.
"""

from __future__ import annotations

from typing import Any

from configs.model import ModelConfig
from configs.run import RunConfig
from configs.transformer import TransformerConfig
from trainer.convert.read_config import read_hf_config
from trainer.errors import ConvertError

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu", "quick_gelu": "quick_gelu"}
_GATED = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "quick_geglu": "quick_gelu"}
_ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
                  "bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration"}  # fmt: skip


def hf_type_of(config: RunConfig) -> str:
    """The HF model type that a configuration is closest to."""
    if config.model.family != "gpt":
        return config.model.family
    if config.model.position_embedding_type == "learned_absolute":
        return "gpt2"
    return "qwen2" if config.transformer.add_qkv_bias and not config.transformer.add_bias_linear else "llama"


def write_hf_config(config: RunConfig) -> dict[str, Any]:
    """The config.json. Raises ConvertError listing everything that has no counterpart."""
    kind = hf_type_of(config)
    write = {"gpt2": _gpt2, "llama": _llama, "qwen2": _llama, "bert": _bert, "t5": _t5}[kind]
    written = {"model_type": kind, **write(config.model, config.transformer)}
    model, transformer = read_hf_config(written, sentence_head=config.model.sentence_head is not None)
    back = _traits(ModelConfig.model_validate(model), TransformerConfig.model_validate(transformer))
    lost = {key: value for key, value in _traits(config.model, config.transformer).items() if back[key] != value}
    if lost:
        lines = [f"{key} is {value}, but HF's {kind} has {back[key]}" for key, value in lost.items()]
        raise ConvertError("this model has no counterpart among HF's models:\n  " + "\n  ".join(lines))
    architecture = "BertForPreTraining" if config.model.sentence_head is not None else _ARCHITECTURES[kind]
    return {"architectures": [architecture], **written}


def _traits(model: ModelConfig, tf: TransformerConfig) -> dict[str, Any]:
    """What decides a trained model's output. A zero-centred gamma is converted, and dropout ends with the training."""
    traits = {
        "model.vocab_size": model.vocab_size,
        "model.max_position_embeddings": model.max_position_embeddings,
        "model.position_embedding_type": model.position_embedding_type,
        "model.share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
        "transformer.ffn_hidden_size": tf.ffn_size,
        "transformer.num_query_groups": tf.query_groups,
        "transformer.head_dim": tf.head_size,
        "transformer.attention_scale": tf.attention_scale or tf.head_size**-0.5,
        "transformer.add_qkv_bias": tf.has_qkv_bias,
    }
    keys = ("num_layers", "hidden_size", "num_attention_heads", "activation", "activation_func_clamp_value",
            "glu_linear_offset", "add_bias_linear", "normalization", "layernorm_epsilon", "layernorm_position", "softmax_type",
            "window_size")  # fmt: skip
    traits |= {f"transformer.{key}": getattr(tf, key) for key in keys}
    special = {
        "rope": ("rotary_base", "rotary_percent", "rotary_interleaved", "rope_scaling"),
        "relative": ("decoder_num_layers", "scale_decoder_outputs", "relative_attention_num_buckets",
                     "relative_attention_max_distance"),
    }  # fmt: skip
    own = special.get(model.position_embedding_type, ()) + (("num_token_types",) if model.family == "bert" else ())
    traits |= {f"model.{key}": getattr(model, key) for key in own}
    if model.family == "t5":
        traits["model.decoder_num_layers"] = model.decoder_num_layers or tf.num_layers
    return traits


def _gpt2(model: ModelConfig, tf: TransformerConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_embd": tf.hidden_size,
        "n_layer": tf.num_layers,
        "n_head": tf.num_attention_heads,
        "n_inner": tf.ffn_size,
        "activation_function": _ACTIVATIONS.get(tf.activation, "gelu_new"),
        "layer_norm_epsilon": tf.layernorm_epsilon,
        "resid_pdrop": tf.hidden_dropout,
        "embd_pdrop": tf.hidden_dropout,
        "attn_pdrop": tf.attention_dropout,
        "scale_attn_weights": tf.attention_scale != 1.0,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
    }


def _llama(model: ModelConfig, tf: TransformerConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rope_scaling is not None:
        scaling = model.rope_scaling.model_dump(exclude_none=True)
        own = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "attention_factor")}
        wanted = ("factor", *own.get(scaling["type"], ()))
        rope |= {"rope_type": scaling["type"]} | {name: scaling[name] for name in wanted if name in scaling}
        if scaling["type"] != "linear":
            rope["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    written = {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_parameters": rope,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "num_hidden_layers": tf.num_layers,
        "hidden_size": tf.hidden_size,
        "num_attention_heads": tf.num_attention_heads,
        "num_key_value_heads": tf.query_groups,
        "head_dim": tf.head_size,
        "intermediate_size": tf.ffn_size,
        "hidden_act": _GATED.get(tf.activation, "silu"),
        "rms_norm_eps": tf.layernorm_epsilon,
        "attention_dropout": tf.attention_dropout,
    }
    if tf.add_qkv_bias and not tf.add_bias_linear:
        return written
    return written | {"attention_bias": tf.add_bias_linear, "mlp_bias": tf.add_bias_linear}


def _bert(model: ModelConfig, tf: TransformerConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "type_vocab_size": model.num_token_types,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "num_hidden_layers": tf.num_layers,
        "hidden_size": tf.hidden_size,
        "num_attention_heads": tf.num_attention_heads,
        "intermediate_size": tf.ffn_size,
        "hidden_act": _ACTIVATIONS.get(tf.activation, "gelu"),
        "layer_norm_eps": tf.layernorm_epsilon,
        "hidden_dropout_prob": tf.hidden_dropout,
        "attention_probs_dropout_prob": tf.attention_dropout,
    }


def _t5(model: ModelConfig, tf: TransformerConfig) -> dict[str, Any]:
    gated = {"swiglu": "gated-silu", "geglu": "gated-gelu", "quick_geglu": "gated-quick_gelu"}
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "d_model": tf.hidden_size,
        "d_kv": tf.head_size,
        "d_ff": tf.ffn_size,
        "num_layers": tf.num_layers,
        "num_decoder_layers": model.decoder_num_layers or tf.num_layers,
        "num_heads": tf.num_attention_heads,
        "relative_attention_num_buckets": model.relative_attention_num_buckets,
        "relative_attention_max_distance": model.relative_attention_max_distance,
        "dropout_rate": tf.hidden_dropout,
        "layer_norm_epsilon": tf.layernorm_epsilon,
        "feed_forward_proj": gated.get(tf.activation) or _ACTIVATIONS.get(tf.activation, "relu"),
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "scale_decoder_outputs": model.scale_decoder_outputs,
        "is_encoder_decoder": True,
    }
