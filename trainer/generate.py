"""Text from a checkpoint, token by token, each with a full pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from configs.run import RunConfig
from configs.transformer import FUSION_FLAGS
from fusions.machine import probe
from models.fusion_sites import fusion_plan
from models.gpt import GPTModel
from models.tensor_parallel.params import TensorParallel
from trainer.checkpoint import complete_checkpoints, incompleteness, load_tensors, read_state
from trainer.data.tokenizer import END_OF_DOCUMENT
from trainer.errors import CheckpointError
from trainer.setup import build_model


def load_model(run: str | Path, device: torch.device) -> tuple[GPTModel, RunConfig, int]:
    """The newest checkpoint of a run folder (or a checkpoint folder itself) as a model of one process, ready for inference."""
    path = Path(run)
    if not (path / "state.json").is_file():
        found = complete_checkpoints(path / "checkpoints")
        if not found:
            raise CheckpointError(f"{path} is neither a checkpoint nor a run folder with a complete one in checkpoints/")
        path = found[-1]
    if problem := incompleteness(path):
        raise CheckpointError(problem)
    state = read_state(path)
    config = _single_process(state["config"])
    plan = fusion_plan(config, probe(device.type))
    model, _ = build_model(config, plan, TensorParallel(), device)
    load_tensors(path, model, None)
    return model.eval(), config, int(state["iteration"])


def _single_process(saved: dict[str, Any]) -> RunConfig:
    parallel = saved["parallel"] | {"tensor_parallel_size": 1, "sequence_parallel": False}
    transformer = saved["transformer"] | dict.fromkeys(FUSION_FLAGS, False)
    return RunConfig.model_validate(saved | {"parallel": parallel, "transformer": transformer})


@torch.no_grad()
def generate(
    model: GPTModel,
    tokenizer: Tokenizer,
    prompt: str,
    config: RunConfig,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """The prompt and its continuation. `temperature` 0 takes the likeliest token; `top_k` 0 samples from all."""
    generator = torch.Generator(model.device).manual_seed(seed)
    eod = tokenizer.token_to_id(END_OF_DOCUMENT)
    ids: list[int] = tokenizer.encode(prompt).ids or [eod or 0]
    for _ in range(max_new_tokens):
        context = torch.tensor([ids[-config.model.max_position_embeddings :]], device=model.device)
        logits = model(context)[-1, 0, : config.model.vocab_size].float()  # [v]
        ids.append(_pick(logits, temperature, top_k, generator))
        if ids[-1] == eod:
            break
    return tokenizer.decode(ids)


def _pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k:
        smallest = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))
