"""What each model family asks of a configuration, and what has no meaning in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.section import Problem

if TYPE_CHECKING:
    from configs.run import RunConfig

_GPT_DATA = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def family_problems(config: RunConfig) -> list[Problem]:
    """Every conflict between the family and the rest."""
    problems = {"gpt": _gpt_problems, "bert": _bert_problems, "t5": _t5_problems}
    return problems[config.model.family](config)


def _gpt_problems(config: RunConfig) -> list[Problem]:
    return [*_positions(config, "learned_absolute", "rope"), *_only_t5(config), *_only_bert(config)]


def _bert_problems(config: RunConfig) -> list[Problem]:
    found = [
        *_positions(config, "learned_absolute", "rope"),
        *_only_t5(config),
        *_not_causal(config),
        *_has_tokenizer(config),
    ]
    tf, model = config.transformer, config.model
    if tf.cross_entropy_fusion_impl == "linear":
        text = "is linear, which knows no bias, but the output layer of bert has one; use native"
        found.append(Problem("transformer.cross_entropy_fusion_impl", text))
    shortest = 5 if model.sentence_head is not None else 4
    if config.data.seq_length < shortest:
        text = f"{config.data.seq_length} leaves no room beside the special tokens; expected {shortest} or more"
        found.append(Problem("data.seq_length", text))
    if model.sentence_head is not None and model.num_token_types == 1:
        text = "is 1, but a pair of segments has two kinds; use 2, or 0 for no such embedding"
        found.append(Problem("model.num_token_types", text))
    return found


def _t5_problems(config: RunConfig) -> list[Problem]:
    found = [*_positions(config, "relative"), *_only_bert(config), *_not_causal(config), *_has_tokenizer(config)]
    data, parallel, model = config.data, config.parallel, config.model
    length, t = data.decoder_seq_length, parallel.tensor_parallel_size
    if length is None:
        return [*found, Problem("data.decoder_seq_length", "is null, but t5 has a decoder; give its tokens per sample")]
    if parallel.sequence_parallel and length % t:
        text = f"{length} is not divisible by parallel.tensor_parallel_size {t}, which parallel.sequence_parallel needs"
        found.append(Problem("data.decoder_seq_length", text))
    if length > model.max_position_embeddings:
        text = f"{length} is longer than model.max_position_embeddings {model.max_position_embeddings}"
        found.append(Problem("data.decoder_seq_length", text))
    if model.relative_attention_num_buckets < 4:
        text = f"{model.relative_attention_num_buckets}; half of them are for each direction: use 4 or more"
        found.append(Problem("model.relative_attention_num_buckets", text))
    if model.relative_attention_max_distance <= model.relative_attention_num_buckets // 2:
        text = f"{model.relative_attention_max_distance}; the distances that share buckets start at "
        text += f"{model.relative_attention_num_buckets // 2}, so it must be above that"
        found.append(Problem("model.relative_attention_max_distance", text))
    raw, needed = t5_lengths(data.seq_length, data.masked_fraction, data.mean_span_length)
    if raw < 2 or needed > length:
        text = f"{length}, but the spans taken out of seq_length {data.seq_length} (masked_fraction {data.masked_fraction}, "
        text += f"mean_span_length {data.mean_span_length}) with their sentinels and the end are {needed} tokens"
        found.append(Problem("data.decoder_seq_length", text))
    return found


def t5_lengths(seq_length: int, masked_fraction: float, mean_span_length: float) -> tuple[int, int]:
    """(tokens of text that give an encoder input of at most `seq_length`, tokens of their targets).

    Both hold a sentinel per span, and one end of sequence (Raffel et al. 2020, arXiv:1910.10683, section 3.1.4). (0, 0) where
    not even two tokens fit.
    """

    def lengths(raw: int) -> tuple[int, int]:
        masked, spans = t5_spans(raw, masked_fraction, mean_span_length)
        return raw - masked + spans + 1, masked + spans + 1

    raw = 1
    while lengths(raw + 1)[0] <= seq_length:
        raw += 1
    return (raw, lengths(raw)[1]) if raw > 1 else (0, 0)


def t5_spans(raw: int, masked_fraction: float, mean_span_length: float) -> tuple[int, int]:
    """(masked tokens, spans) of so many tokens of text: at least one of each, and one token between spans."""
    masked = min(max(round(raw * masked_fraction), 1), raw - 1)
    return masked, max(1, min(round(masked / mean_span_length), masked, raw - masked))


def _positions(config: RunConfig, *allowed: str) -> list[Problem]:
    kind, family = config.model.position_embedding_type, config.model.family
    if kind in allowed:
        return []
    return [Problem("model.position_embedding_type", f"is {kind}; {family} takes {' or '.join(allowed)}")]


def _only_t5(config: RunConfig) -> list[Problem]:
    family, found = config.model.family, []
    for section, key in (("model", "decoder_num_layers"), ("data", "decoder_seq_length")):
        if getattr(getattr(config, section), key) is not None:
            found.append(
                Problem(f"{section}.{key}", f"is set, but {family} has no decoder beside its one stack; set it to null")
            )
    if config.model.scale_decoder_outputs:
        found.append(Problem("model.scale_decoder_outputs", f"is true, but {family} has no such factor; set it to false"))
    return found


def _only_bert(config: RunConfig) -> list[Problem]:
    if config.model.sentence_head is None:
        return []
    text = f"is {config.model.sentence_head}, but {config.model.family} has no such head; set it to null"
    return [Problem("model.sentence_head", text)]


def _not_causal(config: RunConfig) -> list[Problem]:
    family, found = config.model.family, []
    if config.transformer.window_size is not None:
        text = f"is {config.transformer.window_size}, but a window is of keys before the query, and {family} looks both ways"
        found.append(Problem("transformer.window_size", f"{text}; set it to null"))
    for key in _GPT_DATA:
        if getattr(config.data, key):
            found.append(
                Problem(f"data.{key}", f"is for documents packed into one sample of gpt, not {family}; set it to false")
            )
    return found


def _has_tokenizer(config: RunConfig) -> list[Problem]:
    if config.data.tokenizer is not None:
        return []
    return [Problem("data.tokenizer", f"is null, but {config.model.family} needs its special tokens and pieces of words")]
