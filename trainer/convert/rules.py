"""How each parameter here is made of HF tensors, and those of it: numbers are moved, not computed (but for a zero-centred gamma).

    linear_qkv.weight [groups, heads/groups + 2, head_dim, h]   q, k and v, each [heads head_dim, h]
    linear_fc1.weight [ffn, 2, h], gated                        gate and up, each [ffn, h]
    a weight over the vocabulary, padded                        the same without padding

HF's Llama rotates pairs (i, i + d/2), as `rotary_interleaved: false` does here, so no rows are permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.run import RunConfig
from configs.transformer import TransformerConfig


@dataclass(frozen=True)
class Rule:
    """`ours` is made of `theirs` by `join`; `split` takes it apart again."""

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]


def plain(ours: str, theirs: str) -> Rule:
    """The same tensor."""
    return Rule(ours, (theirs,), lambda parts: parts[0], lambda whole: [whole])


def norm(ours: str, theirs: str, tf: TransformerConfig) -> Rule:
    """A norm's weight or bias; the weight is one less here where it is stored zero-centred."""
    if not (tf.layernorm_zero_centered_gamma and ours.endswith("weight")):
        return plain(ours, theirs)
    return Rule(ours, (theirs,), lambda parts: parts[0] - 1, lambda whole: [whole + 1])


def transposed(ours: str, theirs: str) -> Rule:
    """A matrix that HF stores as input x output (GPT-2's Conv1D)."""
    return Rule(ours, (theirs,), lambda parts: parts[0].T, lambda whole: [whole.T])


def vocabulary(ours: str, theirs: str, size: int, padded: int) -> Rule:
    """A row (or number) per token, with rows of zeros for the padding."""

    def join(parts: list[Tensor]) -> Tensor:
        whole = parts[0].new_zeros(padded, *parts[0].shape[1:])
        whole[:size] = parts[0]
        return whole

    return Rule(ours, (theirs,), join, lambda whole: [whole[:size]])


def qkv(ours: str, theirs: tuple[str, str, str], tf: TransformerConfig) -> Rule:
    """Weight or bias of the product for q, k and v, by group."""
    g, d = tf.query_groups, tf.head_size

    def join(parts: list[Tensor]) -> Tensor:
        whole = torch.cat([part.reshape(g, -1, d, *part.shape[1:]) for part in parts], 1)
        return whole if whole.dim() == 4 else whole.flatten()

    def split(whole: Tensor) -> list[Tensor]:
        by_group = whole if whole.dim() == 4 else whole.view(g, -1, d)
        parts = by_group.split([tf.num_attention_heads // g, 1, 1], 1)
        return [part.flatten(0, 2) for part in parts]

    return Rule(ours, theirs, join, split)


def gpt2_qkv(ours: str, theirs: str, tf: TransformerConfig) -> Rule:
    """GPT-2's: q, k and v side by side in one matrix [h, 3 h], or in one bias."""
    rule = qkv(ours, (theirs, theirs, theirs), tf)
    return Rule(
        ours,
        (theirs,),
        lambda parts: rule.join(list(parts[0].T.chunk(3) if parts[0].dim() == 2 else parts[0].chunk(3))),
        lambda whole: [torch.cat(rule.split(whole)).T if whole.dim() == 4 else torch.cat(rule.split(whole))],
    )


def stacked(ours: str, theirs: tuple[str, ...], dims: tuple[int, ...]) -> Rule:
    """Several [n d, h] as [.., d, h]: dims (g, d) of each, side by side in dimension 1."""
    return Rule(
        ours,
        theirs,
        lambda parts: torch.cat([part.reshape(dims[0], -1, dims[1], part.shape[-1]) for part in parts], 1),
        lambda whole: [part.flatten(0, 2) for part in whole.chunk(len(theirs), 1)],
    )


def gated(ours: str, gate: str, up: str) -> Rule:
    """Gate and linear half of a gated MLP: [f, h] twice as [f, 2, h]; or their biases [f] as [2 f], interleaved."""

    def join(parts: list[Tensor]) -> Tensor:
        whole = torch.stack(parts, 1)
        return whole if whole.dim() == 3 else whole.flatten()

    def split(whole: Tensor) -> list[Tensor]:
        return list((whole if whole.dim() == 3 else whole.view(-1, 2)).unbind(1))

    return Rule(ours, (gate, up), join, split)


def rules_of(config: RunConfig, hf_type: str) -> list[Rule]:
    """The rules of an HF model type, for every parameter of the configured model."""
    rules = {"gpt2": _gpt2, "llama": _llama, "qwen2": _llama, "bert": _bert, "t5": _t5}
    return list(rules[hf_type](config))


def norm_before(stack: str, layer: int) -> str:
    """The norm in front of a layer's attention, layers counted from 0; with their number, the norm after the last."""
    return f"{stack}.input_layernorm" if layer == 0 else f"{stack}.layers.{layer - 1}.output_layernorm"


def _sizes(config: RunConfig) -> tuple[int, int]:
    return config.model.vocab_size, config.model.padded_vocab_size


def _gpt2(config: RunConfig) -> Iterator[Rule]:
    tf = config.transformer
    yield vocabulary("embedding.word_embeddings.weight", "transformer.wte.weight", *_sizes(config))
    yield plain("embedding.position_embeddings.weight", "transformer.wpe.weight")
    for kind in ("weight", "bias"):
        product = transposed if kind == "weight" else plain
        for n in range(tf.num_layers):
            ours, theirs = f"decoder.layers.{n}", f"transformer.h.{n}"
            yield norm(f"{norm_before('decoder', n)}.{kind}", f"{theirs}.ln_1.{kind}", tf)
            yield gpt2_qkv(f"{ours}.self_attention.linear_qkv.{kind}", f"{theirs}.attn.c_attn.{kind}", tf)
            yield product(f"{ours}.self_attention.linear_proj.{kind}", f"{theirs}.attn.c_proj.{kind}")
            yield norm(f"{ours}.pre_mlp_layernorm.{kind}", f"{theirs}.ln_2.{kind}", tf)
            yield product(f"{ours}.mlp.linear_fc1.{kind}", f"{theirs}.mlp.c_fc.{kind}")
            yield product(f"{ours}.mlp.linear_fc2.{kind}", f"{theirs}.mlp.c_proj.{kind}")
        yield norm(f"{norm_before('decoder', tf.num_layers)}.{kind}", f"transformer.ln_f.{kind}", tf)
    yield from _untied_output(config)


def _llama(config: RunConfig) -> Iterator[Rule]:
    tf = config.transformer
    yield vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", *_sizes(config))
    for n in range(tf.num_layers):
        ours, theirs = f"decoder.layers.{n}", f"model.layers.{n}"
        q, k, v = (f"{theirs}.self_attn.{name}_proj" for name in "qkv")
        yield norm(f"{norm_before('decoder', n)}.weight", f"{theirs}.input_layernorm.weight", tf)
        yield norm(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", tf)
        for kind in ("weight", "bias"):
            if kind == "weight" or tf.has_qkv_bias:
                names = (f"{q}.{kind}", f"{k}.{kind}", f"{v}.{kind}")
                yield qkv(f"{ours}.self_attention.linear_qkv.{kind}", names, tf)
            if kind == "weight" or tf.add_bias_linear:
                yield plain(f"{ours}.self_attention.linear_proj.{kind}", f"{theirs}.self_attn.o_proj.{kind}")
                yield gated(
                    f"{ours}.mlp.linear_fc1.{kind}", f"{theirs}.mlp.gate_proj.{kind}", f"{theirs}.mlp.up_proj.{kind}"
                )
                yield plain(f"{ours}.mlp.linear_fc2.{kind}", f"{theirs}.mlp.down_proj.{kind}")
    yield norm(f"{norm_before('decoder', tf.num_layers)}.weight", "model.norm.weight", tf)
    yield from _untied_output(config)


def _bert(config: RunConfig) -> Iterator[Rule]:
    """Post-norm: the embedding's norm is the one before the layers here."""
    tf = config.transformer
    yield vocabulary("embedding.word_embeddings.weight", "bert.embeddings.word_embeddings.weight", *_sizes(config))
    yield plain("embedding.position_embeddings.weight", "bert.embeddings.position_embeddings.weight")
    yield plain("embedding.token_type_embeddings.weight", "bert.embeddings.token_type_embeddings.weight")
    for kind in ("weight", "bias"):
        yield norm(f"encoder.input_layernorm.{kind}", f"bert.embeddings.LayerNorm.{kind}", tf)
        for n in range(tf.num_layers):
            ours, theirs = f"encoder.layers.{n}", f"bert.encoder.layer.{n}"
            q, k, v = (f"{theirs}.attention.self.{name}.{kind}" for name in ("query", "key", "value"))
            yield qkv(f"{ours}.self_attention.linear_qkv.{kind}", (q, k, v), tf)
            yield plain(f"{ours}.self_attention.linear_proj.{kind}", f"{theirs}.attention.output.dense.{kind}")
            yield norm(f"{ours}.pre_mlp_layernorm.{kind}", f"{theirs}.attention.output.LayerNorm.{kind}", tf)
            yield plain(f"{ours}.mlp.linear_fc1.{kind}", f"{theirs}.intermediate.dense.{kind}")
            yield plain(f"{ours}.mlp.linear_fc2.{kind}", f"{theirs}.output.dense.{kind}")
            yield norm(f"{ours}.output_layernorm.{kind}", f"{theirs}.output.LayerNorm.{kind}", tf)
        yield plain(f"lm_transform.{kind}", f"cls.predictions.transform.dense.{kind}")
        yield norm(f"lm_transform.norm.{kind}", f"cls.predictions.transform.LayerNorm.{kind}", tf)
        if config.model.sentence_head is not None:
            yield plain(f"sentence_head.pooler_{kind}", f"bert.pooler.dense.{kind}")
            yield plain(f"sentence_head.{kind}", f"cls.seq_relationship.{kind}")
    if config.model.share_embeddings_and_output_weights:
        yield vocabulary("output_layer.bias", "cls.predictions.bias", *_sizes(config))
    else:  # HF then has a second bias that nothing reads; it gets the same values
        rule = vocabulary("output_layer.bias", "cls.predictions.decoder.bias", *_sizes(config))
        yield Rule(rule.ours, (*rule.theirs, "cls.predictions.bias"), rule.join, lambda whole: rule.split(whole) * 2)
        yield vocabulary("output_layer.weight", "cls.predictions.decoder.weight", *_sizes(config))


def _t5(config: RunConfig) -> Iterator[Rule]:
    tf = config.transformer
    yield vocabulary("embedding.word_embeddings.weight", "shared.weight", *_sizes(config))
    layers = {"encoder": tf.num_layers, "decoder": config.model.decoder_num_layers or tf.num_layers}
    for stack, count in layers.items():
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield plain(f"{stack}_position_bias.weight", table)
        for n in range(count):
            yield norm(f"{norm_before(stack, n)}.weight", f"{stack}.block.{n}.layer.0.layer_norm.weight", tf)
            yield from _t5_layer(f"{stack}.layers.{n}", f"{stack}.block.{n}.layer", tf, stack == "decoder")
        yield norm(f"{norm_before(stack, count)}.weight", f"{stack}.final_layer_norm.weight", tf)
    yield from _untied_output(config)


def _t5_layer(ours: str, theirs: str, tf: TransformerConfig, cross: bool) -> Iterator[Rule]:
    own, mlp = f"{theirs}.0.SelfAttention", f"{theirs}.{2 if cross else 1}"
    dims = (tf.query_groups, tf.head_size)
    names = (f"{own}.q.weight", f"{own}.k.weight", f"{own}.v.weight")
    yield qkv(f"{ours}.self_attention.linear_qkv.weight", names, tf)
    yield plain(f"{ours}.self_attention.linear_proj.weight", f"{own}.o.weight")
    if cross:
        other = f"{theirs}.1.EncDecAttention"
        yield norm(f"{ours}.pre_cross_attn_layernorm.weight", f"{theirs}.1.layer_norm.weight", tf)
        yield stacked(f"{ours}.cross_attention.linear_q.weight", (f"{other}.q.weight",), dims)
        yield stacked(f"{ours}.cross_attention.linear_kv.weight", (f"{other}.k.weight", f"{other}.v.weight"), dims)
        yield plain(f"{ours}.cross_attention.linear_proj.weight", f"{other}.o.weight")
    yield norm(f"{ours}.pre_mlp_layernorm.weight", f"{mlp}.layer_norm.weight", tf)
    dense = f"{mlp}.DenseReluDense"
    if tf.gated:
        yield gated(f"{ours}.mlp.linear_fc1.weight", f"{dense}.wi_0.weight", f"{dense}.wi_1.weight")
    else:
        yield plain(f"{ours}.mlp.linear_fc1.weight", f"{dense}.wi.weight")
    yield plain(f"{ours}.mlp.linear_fc2.weight", f"{dense}.wo.weight")


def _untied_output(config: RunConfig) -> Iterator[Rule]:
    if not config.model.share_embeddings_and_output_weights:
        yield vocabulary("output_layer.weight", "lm_head.weight", *_sizes(config))
