"""BERT and T5: the promises that GPT keeps, and what is their own. N27 N28 T01 T02 T08 T11 T16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch.utils.flop_counter import FlopCounterMode

from configs.run import RunConfig
from fusions.machine import probe
from fusions.random import DropoutKeys, site_words
from models.cache import KeyValueCache
from models.embedding import relative_bucket
from models.fusion_sites import fusion_plan
from tests.distributed import run_ranks
from tests.models.build import BERT, T5, build, run_config, samples_of
from tests.models.test_tensor_parallel import same_training, train
from trainer.data.families import make_batch
from trainer.flops import flops_per_sample, num_parameters

FAMILIES = {"bert": BERT, "t5": T5}
VARIANTS = [
    BERT,
    BERT | {"model.sentence_head": None, "transformer.layernorm_position": "pre", "model.num_token_types": 0},
    BERT | {"model.position_embedding_type": "rope", "transformer.activation": "swiglu", "transformer.num_query_groups": 2},
    BERT | {"model.share_embeddings_and_output_weights": False, "transformer.normalization": "RMSNorm"},
    T5,
    T5
    | {"transformer.activation": "geglu", "model.share_embeddings_and_output_weights": False, "transformer.head_dim": None},
    T5
    | {
        "transformer.add_bias_linear": True,
        "transformer.softmax_type": "learnable",
        "transformer.normalization": "LayerNorm",
    },
]


def losses(model: Any, config: RunConfig, keys: DropoutKeys | None = None, seed: int = 3) -> torch.Tensor:
    batch = make_batch(samples_of(config, 4, torch.Generator().manual_seed(seed)), [0, 1, 2, 3], config)
    counts = batch.counts()
    return torch.stack([total / counts[name] for name, total in batch.losses(model, keys).items()]).sum()


def without_dropout(overrides: dict[str, Any]) -> dict[str, Any]:
    return overrides | {"transformer.hidden_dropout": 0.0, "transformer.attention_dropout": 0.0}


@pytest.mark.parametrize("overrides", VARIANTS, ids=range(len(VARIANTS)))
def test_parameter_and_flop_counts_are_the_built_models(overrides: dict[str, Any]) -> None:
    config = run_config(without_dropout(overrides))
    model, _ = build(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        losses(model, config).backward()
    assert counter.get_total_flops() == flops_per_sample(config) * 4
    assert all(p.grad is not None for p in model.parameters())


@pytest.fixture(scope="module")
def unsharded() -> dict[str, dict[str, Any]]:
    return {family: train(overrides, False) for family, overrides in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "sequence_parallel", "fused"), [(2, False, False), (2, True, True), (4, True, False)])
def test_T01_T08_T11_the_same_training_at_every_size(
    family: str, size: int, sequence_parallel: bool, fused: bool, unsharded: dict[str, Any]
) -> None:
    ranks = run_ranks(size, train, FAMILIES[family] | {"parallel.sequence_parallel": sequence_parallel}, fused)
    for result in ranks:
        same_training(result, unsharded[family])
        for name, weight in result["initial"].items():
            assert torch.equal(weight, unsharded[family]["initial"][name]), name
        for name, weight in result["replicated"].items():
            assert torch.equal(weight, ranks[0]["replicated"][name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_T02_all_fusions_change_no_training_and_each_site_is_called(family: str, unsharded: dict[str, Any]) -> None:
    overrides = FAMILIES[family] | {"training.micro_batch_size": 2}
    result = train(overrides, True)
    same_training(result, unsharded[family])
    plan = fusion_plan(run_config(overrides, True), probe("cpu"))
    active = {f"{d.flag} @ {d.site}" for d in plan.decisions if d.runs != "reference"}
    assert {site for site, counts in result["counters"].items() if counts["fused"]} == active
    stacks = {"bert": {""}, "t5": {"encoder.", "decoder."}}[family]
    assert {f"masked_softmax_fusion @ {stack}self_attention" for stack in stacks} <= active
    if family == "t5":
        assert {"masked_softmax_fusion @ decoder.cross_attention",
                "residual_norm_fusion @ decoder.cross_attn_bda + pre_mlp_layernorm",
                "gradient_accumulation_fusion @ decoder.linear_kv"} <= active  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [(), ("residual_norm_fusion", "masked_softmax_fusion", "bias_activation_fusion")], ids=str)
def test_compiled_layers_compute_the_same(family: str, fused: tuple[str, ...]) -> None:
    found = []
    for compiled in (False, True):
        config = run_config(FAMILIES[family] | {"training.compile_layers": compiled}, fused=fused)
        model, counters = build(config)
        for iteration in (1, 2):
            words = site_words(7, iteration, model.num_dropout_sites)
            model.zero_grad()
            loss = losses(model, config, DropoutKeys(words, torch.arange(4)))
            loss.backward()
        found.append((loss.item(), {n: p.grad for n, p in model.named_parameters()}, counters.as_dict()))
    (eager, grads, counts), (loss, compiled_grads, compiled_counts) = found
    assert loss == pytest.approx(eager, rel=1e-5) and compiled_counts == counts
    total = torch.stack([g.norm() for g in grads.values()]).norm()
    for name, grad in grads.items():
        assert (grad - compiled_grads[name]).norm() <= 1e-5 * max(grad.norm(), 1e-3 * total), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["unfused", "sdpa"])
def test_padding_changes_nothing(family: str, backend: str) -> None:
    config = run_config(without_dropout(FAMILIES[family] | {"transformer.attention_backend": backend}))
    model, _ = build(config)
    model.eval()
    batch = make_batch(samples_of(config, 2, torch.Generator().manual_seed(0)), [0, 1], config)
    padding = batch.attention_mask[:, 0, 0]
    assert padding.any()
    first = batch.losses(model, None)
    batch.tokens[padding] = (batch.tokens[padding] + 7) % 300
    assert all(torch.equal(first[name], total) for name, total in batch.losses(model, None).items())


def test_N27_only_masked_tokens_and_both_classes_of_sentences_count() -> None:
    config = run_config(without_dropout(BERT))
    model, _ = build(config)
    with torch.no_grad():  # a model that knows nothing: every class is as likely as every other
        for parameter in model.parameters():
            parameter.zero_()
    batch = make_batch(samples_of(config, 4, torch.Generator().manual_seed(0)), [0, 1, 2, 3], config)
    counts, sums = batch.counts(), batch.losses(model, None)
    assert counts["masked_lm"] == (batch.labels >= 0).sum() < batch.labels.numel() / 2 and counts["sentence"] == 4
    assert sums["masked_lm"].item() / counts["masked_lm"] == pytest.approx(math.log(301), rel=1e-5)
    assert sums["sentence"].item() / 4 == pytest.approx(math.log(2), rel=1e-6)
    for label in (0, 1):
        batch.sentence_labels.fill_(label)
        assert batch.losses(model, None)["sentence"].item() / 4 == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (12, 50)])
def test_N28_buckets_are_those_of_hf(causal: bool, buckets: int, distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    positions = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(positions, not causal, buckets, distance)
    assert torch.equal(relative_bucket(positions, buckets, distance, causal), theirs)


def test_N28_a_bias_in_self_attention_only_one_a_stack() -> None:
    model, _ = build(run_config(T5))
    assert [n for n, _ in model.named_parameters() if "bias" in n] == [
        "encoder_position_bias.weight",
        "decoder_position_bias.weight",
    ]


CACHED = [
    {},
    {"model.position_embedding_type": "rope", "transformer.num_query_groups": 2, "transformer.window_size": 5},
    {"transformer.attention_backend": "sdpa", "transformer.attention_dropout": 0.0, "transformer.window_size": 7},
]


@pytest.mark.parametrize("overrides", CACHED, ids=range(3))
def test_a_cache_gives_the_logits_of_a_full_pass(overrides: dict[str, Any]) -> None:
    config = run_config(overrides)
    model, _ = build(config)
    model.eval()
    tokens = torch.randint(0, 301, (2, 20), generator=torch.Generator().manual_seed(0))
    whole, cache, parts, start = model(tokens), KeyValueCache(3), [], 0
    for count in (6, 1, 1, 5, 1, 6):  # a prompt, single tokens, and several at once
        parts.append(model(tokens[:, start : start + count], cache=cache))
        start += count
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)
    assert cache.length == 20


@pytest.mark.parametrize("backend", ["unfused", "sdpa"])
def test_a_cache_of_a_t5_gives_the_logits_of_a_full_pass(backend: str) -> None:
    config = run_config(without_dropout(T5 | {"transformer.attention_backend": backend}))
    model, _ = build(config)
    model.eval()
    random = torch.Generator().manual_seed(0)
    tokens, decoder = (torch.randint(0, 301, (2, n), generator=random) for n in (18, 12))
    mask = (torch.arange(18) >= torch.tensor([[18], [11]]))[:, None, None]
    whole, cache, context = model(tokens, decoder, mask), KeyValueCache(2), model.encode(tokens, mask)
    parts = [model.decode(decoder[:, i : i + n], context, mask, cache=cache) for i, n in ((0, 3), (3, 1), (4, 1), (5, 7))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (T5 | {"data.decoder_seq_length": None}, "data.decoder_seq_length"),
        (T5 | {"data.decoder_seq_length": 6}, "data.decoder_seq_length"),
        (T5 | {"data.decoder_seq_length": 15, "parallel.tensor_parallel_size": 2, "parallel.sequence_parallel": True},
         "data.decoder_seq_length"),  # T16
        (T5 | {"data.decoder_seq_length": 128}, "data.decoder_seq_length"),
        (T5 | {"model.position_embedding_type": "rope"}, "model.position_embedding_type"),
        (T5 | {"model.relative_attention_num_buckets": 3}, "model.relative_attention_num_buckets"),
        (T5 | {"model.relative_attention_max_distance": 3}, "model.relative_attention_max_distance"),
        (T5 | {"transformer.window_size": 4}, "transformer.window_size"),
        (T5 | {"data.tokenizer": None}, "data.tokenizer"),
        (T5 | {"model.sentence_head": "next_sentence"}, "model.sentence_head"),
        (BERT | {"transformer.cross_entropy_fusion_impl": "linear"}, "transformer.cross_entropy_fusion_impl"),
        (BERT | {"data.eod_token": 1, "data.reset_attention_mask": True}, "data.reset_attention_mask"),
        (BERT | {"model.num_token_types": 1}, "model.num_token_types"),
        (BERT | {"model.position_embedding_type": "relative"}, "model.position_embedding_type"),
        (BERT | {"model.decoder_num_layers": 2}, "model.decoder_num_layers"),
        ({"model.scale_decoder_outputs": True}, "model.scale_decoder_outputs"),
        ({"model.sentence_head": "sentence_order"}, "model.sentence_head"),
        ({"model.position_embedding_type": "relative"}, "model.position_embedding_type"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_in_a_family_is_refused(overrides: dict[str, Any], key: str) -> None:
    with pytest.raises(AssertionError, match=key):
        run_config(overrides)
