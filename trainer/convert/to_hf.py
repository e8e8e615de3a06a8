"""A checkpoint here -> an HF model's folder, a tensor at a time: config.json, safetensors, the tokenizer's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from configs.run import RunConfig
from trainer.checkpoint import ParameterReader, newest_checkpoint, read_state
from trainer.convert.from_hf import COMPANION_FILES, HF_CONFIG, parameter_shapes, read_json
from trainer.convert.rules import Rule, rules_of
from trainer.convert.safetensors_file import DTYPES, SafetensorsWriter
from trainer.convert.staging import staged
from trainer.convert.write_config import hf_type_of, write_hf_config
from trainer.data.tokenizer import SPECIAL_TOKENS, load_tokenizer
from trainer.errors import ConvertError

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# What HF calls the kinds of special tokens: in config.json, and in tokenizer_config.json.
_TOKEN_KEYS = {
    "end": ("eos_token", "bos_token"),
    "pad": ("pad_token",),
    "cls": ("cls_token",),
    "sep": ("sep_token",),
    "mask": ("mask_token",),
    "unknown": ("unk_token",),
}


def convert_to_hf(
    source: str | Path, out: str | Path, dtype: str | None = None, shard_bytes: int = 5 << 30, tokenizer: str | None = None
) -> dict[str, Any]:
    """Write the HF folder `out` from a checkpoint, or the newest one of a run's folder; its config.json.

    `dtype`: fp32, bf16 or fp16; that of the HF model the checkpoint came from when None, else fp32. `tokenizer`: instead of the
    one the checkpoint names. Raises ConvertError listing what HF's models have no counterpart for; CheckpointError.
    """
    path, out = newest_checkpoint(source), Path(out)
    config = RunConfig.model_validate(read_state(path)["config"])
    if tokenizer is not None and not Path(tokenizer).is_file():
        raise ConvertError(f"tokenizer {tokenizer} is missing")
    home = _home(path, config)
    origin = read_json(home / HF_CONFIG) if (home / HF_CONFIG).is_file() else {}
    written = write_hf_config(config)
    chosen = DTYPES[dtype] if dtype else _origin_dtype(origin)
    rules = rules_of(config, hf_type_of(config))
    with staged(out) as folder:
        _write_tensors(folder, path, rules, parameter_shapes(config), chosen, shard_bytes)
        kept = {key: value for key, value in origin.items() if key.endswith("_token_id") and value is not None}
        tokens = _write_tokenizer(folder, home, config, tokenizer)
        written |= {"dtype": _DTYPE_NAMES[chosen], **kept, **tokens}
        if config.model.family == "t5" and "pad_token_id" in written:
            written["decoder_start_token_id"] = written["pad_token_id"]  # what T5's decoder starts from
        (folder / "config.json").write_text(json.dumps(written, indent=1))
    return written


def _home(path: Path, config: RunConfig) -> Path:
    """The folder that the files of an HF model are in, where there was one: the checkpoint, or that of the run's tokenizer."""
    source = config.data.tokenizer
    return path if (path / HF_CONFIG).is_file() or source is None else Path(source).parent


def _origin_dtype(origin: dict[str, Any]) -> torch.dtype:
    names = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
    return names.get(str(origin.get("dtype") or origin.get("torch_dtype")), torch.float32)


def _write_tensors(
    folder: Path, path: Path, rules: list[Rule], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, shard_bytes: int
) -> None:
    """One file, or several of about `shard_bytes` with their index."""
    shards: list[list[Rule]] = [[]]
    size = 0
    for rule in rules:
        bytes_ = torch.Size(shapes[rule.ours]).numel() * dtype.itemsize
        if shards[-1] and size + bytes_ > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(rule)
        size += bytes_
    reader, weight_map = ParameterReader(path), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        theirs = {
            key: tuple(part.shape)
            for rule in shard
            for key, part in zip(rule.theirs, rule.split(torch.empty(shapes[rule.ours], device="meta")), strict=True)
        }
        weight_map |= dict.fromkeys(theirs, name)
        with SafetensorsWriter(folder / name, theirs, dtype) as writer:
            for rule in shard:
                for key, part in zip(rule.theirs, rule.split(reader.read(rule.ours)), strict=True):
                    writer.add(key, part)
    if len(shards) > 1:
        total = sum((folder / name).stat().st_size for name in set(weight_map.values()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_tokenizer(folder: Path, home: Path, config: RunConfig, given: str | None) -> dict[str, int]:
    """The tokenizer's files: those that came with the HF model, or what AutoTokenizer needs beside a tokenizer.json. The ids of
    its special tokens, by config.json's names."""
    home = home if given is None else Path(given).parent
    own = [name for name in COMPANION_FILES if (home / name).is_file()]
    if "tokenizer_config.json" in own or (given is None and (home / HF_CONFIG).is_file()):
        for name in own:
            shutil.copyfile(home / name, folder / name)
        return {}
    source = given or config.data.tokenizer
    if source is None or not Path(source).is_file():
        return {}
    tokenizer, names, ids = load_tokenizer(source), dict[str, Any](), dict[str, int]()
    for kind, candidates in SPECIAL_TOKENS[config.model.family].items():
        for token in candidates:
            if (id_ := tokenizer.token_to_id(token)) is not None:
                names |= dict.fromkeys(_TOKEN_KEYS[kind], token)
                ids |= {f"{key}_id": id_ for key in _TOKEN_KEYS[kind] if key != "unk_token"}
                break
    if Path(source).suffix == ".model":
        shutil.copyfile(source, folder / "spiece.model")
        names["tokenizer_class"] = "T5Tokenizer"
    else:
        shutil.copyfile(source, folder / "tokenizer.json")
        names["tokenizer_class"] = "PreTrainedTokenizerFast"
    names |= {"model_max_length": config.model.max_position_embeddings, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1))
    return ids
