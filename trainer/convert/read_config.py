"""config.json of an HF model -> the sections `model` and `transformer`: gpt2, llama, qwen2, bert, t5.

What is not known here, or has no counterpart, is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.errors import ConvertError

Sections = tuple[dict[str, Any], dict[str, Any]]  # model, transformer

# Keys that say nothing about the mathematics of a forward pass in training.
_IGNORED = {
    "model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache", "return_dict",
    "output_hidden_states", "output_attentions", "id2label", "label2id", "num_labels", "problem_type", "chunk_size_feed_forward",
    "is_encoder_decoder", "initializer_range", "initializer_factor", "classifier_dropout", "task_specific_params", "n_ctx",
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id", "pretraining_tp",
    "gradient_checkpointing", "max_window_layers", "reorder_and_upcast_attn", "_attn_implementation", "attn_implementation",
    "_attn_implementation_autoset", "finetuning_task", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "dense_act_fn", "is_gated_act", "tokenizer_class", "directionality",
    "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "vocab_file",
}  # fmt: skip
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu",
                "swish": "silu", "quick_gelu": "quick_gelu"}  # fmt: skip
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu", "quick_gelu": "quick_geglu"}


class _Keys:
    """The keys of a config.json; each is taken once, and what is left over has to mean nothing."""

    def __init__(self, data: dict[str, Any]):
        self.left, self.problems = dict(data), list[str]()

    def take(self, key: str, default: Any = None) -> Any:
        return self.left.pop(key, default)

    def need(self, key: str) -> Any:
        if self.left.get(key) is None:
            self.problems.append(f"{key} is missing")
        return self.left.pop(key, None)

    def only(self, key: str, *allowed: Any, default: Any = None) -> None:
        """Refuse any other value."""
        value = self.take(key, allowed[0] if default is None else default)
        if value not in allowed:
            self.problems.append(f"{key}: {value!r} is not supported; only {' or '.join(map(repr, allowed))}")

    def mapped(self, key: str, names: dict[str, str], default: str) -> str:
        """The name here of a value."""
        value = self.take(key, default)
        if value not in names:
            self.problems.append(f"{key}: {value!r} is not supported; only {', '.join(names)}")
        return names.get(value, next(iter(names.values())))

    def finish(self) -> None:
        self.problems += [f"{k}: {v!r} is a feature unknown here" for k, v in self.left.items() if k not in _IGNORED and v]
        if self.problems:
            raise ConvertError("this model can't be converted:\n  " + "\n  ".join(self.problems))


def read_hf_config(data: dict[str, Any], sentence_head: bool) -> Sections:
    """The sections of a config.json; `sentence_head`: whether a BERT's tensors have one. Raises ConvertError."""
    readers: dict[str, Callable[[_Keys], Sections]] = {
        "gpt2": _read_gpt2,
        "llama": _read_llama,
        "qwen2": _read_qwen2,
        "bert": lambda keys: _read_bert(keys, sentence_head),
        "t5": _read_t5,
    }
    kind = data.get("model_type")
    if kind not in readers:
        raise ConvertError(f"model_type {kind!r} is not supported; only {', '.join(readers)}")
    keys = _Keys(data)
    sections = readers[kind](keys)
    keys.finish()
    return sections


def _read_gpt2(keys: _Keys) -> Sections:
    layers, heads = keys.need("n_layer"), keys.need("n_head")
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("add_cross_attention", False)
    embedding, residual = keys.take("embd_pdrop", 0.1), keys.take("resid_pdrop", 0.1)
    if embedding != residual:
        keys.problems.append(f"embd_pdrop {embedding} and resid_pdrop {residual} differ; there is one hidden_dropout here")
    model = {
        "family": "gpt",
        "vocab_size": keys.need("vocab_size"),
        "max_position_embeddings": keys.need("n_positions"),
        "share_embeddings_and_output_weights": keys.take("tie_word_embeddings", True),
    }
    transformer = {
        "num_layers": layers,
        "hidden_size": keys.need("n_embd"),
        "num_attention_heads": heads,
        "ffn_hidden_size": keys.take("n_inner"),
        "activation": keys.mapped("activation_function", ACTIVATIONS, "gelu_new"),
        "hidden_dropout": residual,
        "attention_dropout": keys.take("attn_pdrop", 0.1),
        "layernorm_epsilon": keys.take("layer_norm_epsilon", 1e-5),
        "attention_scale": None if keys.take("scale_attn_weights", True) else 1.0,
    }
    return model, transformer


def _read_llama(keys: _Keys) -> Sections:
    attention_bias, mlp_bias = keys.take("attention_bias", False), keys.take("mlp_bias", False)
    if attention_bias != mlp_bias:
        keys.problems.append(
            f"attention_bias {attention_bias} and mlp_bias {mlp_bias}: biases are in all linear layers here, or none"
        )
    return _read_llama_like(keys, {"add_bias_linear": attention_bias})


def _read_qwen2(keys: _Keys) -> Sections:
    keys.only("use_sliding_window", False)
    keys.take("sliding_window")
    kinds = set(keys.take("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        keys.problems.append(f"layer_types: {', '.join(sorted(kinds))}; only full_attention is supported")
    return _read_llama_like(keys, {"add_bias_linear": False, "add_qkv_bias": True})


def _read_llama_like(keys: _Keys, biases: dict[str, Any]) -> Sections:
    rope = dict(keys.take("rope_scaling") or {}) | dict(keys.take("rope_parameters") or {})
    base = rope.pop("rope_theta", None) or 10000.0
    base = keys.take("rope_theta", base)
    if rope.get("partial_rotary_factor") == 1.0:
        rope.pop("partial_rotary_factor")
    model = {
        "family": "gpt",
        "vocab_size": keys.need("vocab_size"),
        "max_position_embeddings": keys.need("max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": float(base),
        "rope_scaling": _read_rope(rope, keys),
        "share_embeddings_and_output_weights": keys.take("tie_word_embeddings", False),
    }
    transformer = {
        "num_layers": keys.need("num_hidden_layers"),
        "hidden_size": keys.need("hidden_size"),
        "num_attention_heads": keys.need("num_attention_heads"),
        "num_query_groups": keys.take("num_key_value_heads"),
        "head_dim": keys.take("head_dim"),
        "ffn_hidden_size": keys.need("intermediate_size"),
        "activation": keys.mapped("hidden_act", GATED, "silu"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": keys.take("rms_norm_eps", 1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": keys.take("attention_dropout", 0.0),
        **biases,
    }
    return model, transformer


def _read_rope(rope: dict[str, Any], keys: _Keys) -> dict[str, Any] | None:
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind == "default":
        return None
    names = {"linear": (), "llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
    if kind not in names:
        keys.problems.append(f"rope_type: {kind!r} is not supported; only default, {', '.join(names)}")
        return None
    found: dict[str, Any] = {"type": kind, "factor": float(rope.pop("factor", 1.0))}
    found |= {name: float(rope.pop(name)) for name in names[kind] if rope.get(name) is not None}
    if kind == "yarn" and rope.get("attention_factor") is not None:
        found["attention_factor"] = float(rope.pop("attention_factor"))
    original = rope.pop("original_max_position_embeddings", None)
    if kind != "linear":
        found["original_max_position_embeddings"] = original
    keys.problems += [f"rope {name}: {value!r} is not supported" for name, value in rope.items() if value is not None]
    return found


def _read_bert(keys: _Keys, sentence_head: bool) -> Sections:
    keys.only("position_embedding_type", "absolute")
    keys.only("is_decoder", False)
    keys.only("add_cross_attention", False)
    model = {
        "family": "bert",
        "vocab_size": keys.need("vocab_size"),
        "max_position_embeddings": keys.need("max_position_embeddings"),
        "num_token_types": keys.take("type_vocab_size", 2),
        "sentence_head": "next_sentence" if sentence_head else None,
        "share_embeddings_and_output_weights": keys.take("tie_word_embeddings", True),
    }
    transformer = {
        "num_layers": keys.need("num_hidden_layers"),
        "hidden_size": keys.need("hidden_size"),
        "num_attention_heads": keys.need("num_attention_heads"),
        "ffn_hidden_size": keys.need("intermediate_size"),
        "activation": keys.mapped("hidden_act", ACTIVATIONS, "gelu"),
        "layernorm_position": "post",
        "layernorm_epsilon": keys.take("layer_norm_eps", 1e-12),
        "hidden_dropout": keys.take("hidden_dropout_prob", 0.1),
        "attention_dropout": keys.take("attention_probs_dropout_prob", 0.1),
    }
    return model, transformer


def _read_t5(keys: _Keys) -> Sections:
    projection = keys.take("feed_forward_proj", "relu")
    gate, _, act = projection.rpartition("-")
    names = GATED | {"gelu": "geglu"} if gate == "gated" else ACTIVATIONS  # T5's "gated-gelu" is the tanh form
    if gate not in ("", "gated") or act not in names:
        keys.problems.append(f"feed_forward_proj: {projection!r} is not supported")
    keys.only("is_decoder", False)
    layers, tied, dropout = keys.need("num_layers"), keys.take("tie_word_embeddings", True), keys.take("dropout_rate", 0.1)
    model = {
        "family": "t5",
        "vocab_size": keys.need("vocab_size"),
        "max_position_embeddings": keys.take("n_positions", 512),
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": keys.take("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": keys.take("relative_attention_max_distance", 128),
        "decoder_num_layers": keys.take("num_decoder_layers") or layers,
        "share_embeddings_and_output_weights": tied,
        "scale_decoder_outputs": keys.take("scale_decoder_outputs", tied),
    }
    transformer = {
        "num_layers": layers,
        "hidden_size": keys.need("d_model"),
        "num_attention_heads": keys.need("num_heads"),
        "head_dim": keys.need("d_kv"),
        "ffn_hidden_size": keys.need("d_ff"),
        "activation": names.get(act, "relu"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": keys.take("layer_norm_epsilon", 1e-6),
        "add_bias_linear": False,
        "attention_scale": 1.0,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
    }
    return model, transformer
