"""Text from a checkpoint: a GPT continues, a T5 answers, a BERT fills in masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.run import RunConfig
from configs.transformer import FUSION_FLAGS
from fusions.machine import probe
from models.cache import KeyValueCache
from models.fusion_sites import fusion_plan, stacks
from trainer.checkpoint import load_tensors, newest_checkpoint, read_state
from trainer.data.tokenizer import TextTokenizer, end_of_document, vocabulary_of
from trainer.errors import UserError
from trainer.meshes import Meshes
from trainer.setup import build_model

Pick = Callable[[Tensor], int]


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked: `temperature` 0 the likeliest; `top_k` of the k likeliest (0: of all); `top_p` of the
    likeliest that together have this probability (Holtzman et al. 2020, arXiv:1904.09751)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def pick(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token of fp32 logits [v]."""
        if self.temperature == 0:
            return int(logits.argmax())
        logits = (logits - logits.max()) / self.temperature  # the largest is 0 however small the temperature
        if self.top_k:
            smallest = logits.topk(min(self.top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < smallest, float("-inf"))
        if self.top_p < 1:
            ordered, order = torch.softmax(logits, -1).sort(descending=True)
            beyond = ordered.cumsum(0) - ordered >= self.top_p  # the one that reaches top_p still counts
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), float("-inf"))
        return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))


def load_model(run: str | Path, device: torch.device) -> tuple[Any, RunConfig, int]:
    """The newest checkpoint of a run folder (or a checkpoint folder itself) as a model of one process, ready for inference."""
    path = newest_checkpoint(run)
    state = read_state(path)
    config = _single_process(state["config"])
    plan = fusion_plan(config, probe(device.type))
    model, _ = build_model(config, plan, Meshes(), device)
    load_tensors(path, model, None)
    return model.eval(), config, int(state["iteration"])


def _single_process(saved: dict[str, Any]) -> RunConfig:
    transformer = saved["transformer"] | dict.fromkeys(FUSION_FLAGS, False)
    training = saved["training"] | {"compile_layers": False}
    return RunConfig.model_validate(saved | {"parallel": {}, "transformer": transformer, "training": training})


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: TextTokenizer,
    prompt: str,
    config: RunConfig,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
) -> str:
    """A GPT's prompt and its continuation, or a T5's answer to the prompt. Ends at an end of document, or at the last position.

    Raises UserError for a prompt that is too long.
    """
    random = torch.Generator(model.device).manual_seed(seed)

    def pick(logits: Tensor) -> int:
        return sampling.pick(logits[-1, 0, : config.model.vocab_size].float(), random)

    if config.model.family == "gpt":
        eod = end_of_document(tokenizer) if config.data.eod_token is None else config.data.eod_token
        ids = list(tokenizer.encode(prompt).ids) or [eod or 0]  # with what its own rule puts in front: Llama's start of text
        return tokenizer.decode(_continue(model, _fitting(ids, config), config, max_new_tokens, pick, eod))
    vocabulary = vocabulary_of(tokenizer, "t5", "of the run")
    ids = [*tokenizer.encode(prompt, add_special_tokens=False).ids, vocabulary.special("end")]
    start, end = vocabulary.special("pad"), vocabulary.special("end")
    answer = _answer(model, _fitting(ids, config), config, max_new_tokens, pick, (start, end))
    return tokenizer.decode(answer, skip_special_tokens=False)


def _fitting(ids: list[int], config: RunConfig) -> list[int]:
    longest, vocabulary = config.model.max_position_embeddings, config.model.vocab_size
    if max(ids, default=0) >= vocabulary:
        raise UserError(f"the tokenizer gives token {max(ids)}, but model.vocab_size is {vocabulary}; it is another model's")
    if len(ids) > longest:
        raise UserError(f"the prompt has {len(ids)} tokens, but model.max_position_embeddings is {longest}")
    return ids


def _continue(model: Any, ids: list[int], config: RunConfig, limit: int, pick: Pick, eod: int | None) -> list[int]:
    """The ids and those that follow; only the new ones go through the model, the others are in its cache."""
    cache, fresh = KeyValueCache(config.transformer.num_layers), ids
    for _ in range(min(limit, config.model.max_position_embeddings - len(ids))):
        fresh = [pick(model(torch.tensor([fresh], device=model.device), cache=cache))]
        ids = ids + fresh
        if fresh[0] == eod:
            break
    return ids


def _answer(
    model: Any, ids: list[int], config: RunConfig, limit: int, pick: Pick, start_and_end: tuple[int, int]
) -> list[int]:
    """What the decoder says of the encoder's ids."""
    fresh, end = start_and_end
    context, answer = model.encode(torch.tensor([ids], device=model.device), None), []
    cache = KeyValueCache(stacks(config)[-1].num_layers)
    for _ in range(min(limit, config.model.max_position_embeddings)):
        fresh = pick(model.decode(torch.tensor([[fresh]], device=model.device), context, None, cache=cache))
        if fresh == end:
            break
        answer.append(fresh)
    return answer


@torch.no_grad()
def fill_masks(
    model: Any, tokenizer: TextTokenizer, text: str, config: RunConfig, count: int = 5
) -> tuple[str, list[list[tuple[str, float]]]]:
    """(the text with each mask replaced by its likeliest token, the `count` likeliest of each with their probabilities).

    Raises UserError where the text has no mask, or is too long.
    """
    vocabulary = vocabulary_of(tokenizer, "bert", "of the run")
    mask = vocabulary.special("mask")
    ids = [vocabulary.special("cls"), *tokenizer.encode(text, add_special_tokens=False).ids, vocabulary.special("sep")]
    places = [place for place, id_ in enumerate(_fitting(ids, config)) if id_ == mask]
    if not places:
        raise UserError(f"the text has no {tokenizer.id_to_token(mask)} to fill in")
    logits, _ = model(torch.tensor([ids], device=model.device))
    found = []
    for place in places:
        best = torch.softmax(logits[place, 0, : config.model.vocab_size].float(), -1)
        best = best.topk(min(count, len(best)))
        ids[place] = int(best.indices[0])
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.append([(tokenizer.id_to_token(id_) or "", probability) for id_, probability in pairs])
    return tokenizer.decode(ids), found
