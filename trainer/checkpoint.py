"""Checkpoints: tensors as safetensors through torch.distributed.checkpoint, everything else in one JSON. No pickle.

    checkpoints/iter_0000100/shard-*.safetensors   model.*, optimizer.*; any tensor-parallel size can load them
                             state.json            iteration, configuration, fusion plan, versions
                             complete.json         written last: every file and its size

A checkpoint is written beside its final name and renamed when complete, so a folder iter_N is whole or not there.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel
from torch import Tensor, nn

from configs.load import LoadedConfig
from configs.run import RunConfig
from trainer.errors import CheckpointError
from trainer.optimizer import LOSS_SCALE, Optimizer

MARKER, STATE = "complete.json", "state.json"
# Keys that must be the same for a resume to mean anything, and keys that decide which data comes next.
_ARCHITECTURE = ("model.", "transformer.num_", "transformer.hidden_size", "transformer.ffn_hidden_size", "transformer.head_dim",
                 "transformer.normalization", "transformer.layernorm_", "transformer.activation", "transformer.add_bias_linear",
                 "transformer.add_qkv_bias", "transformer.attention_scale", "transformer.window_size", "transformer.softmax_type",
                 "transformer.glu_linear_offset")  # fmt: skip
_DATA_ORDER = ("data.seq_length", "data.decoder_seq_length", "data.train", "data.masked_fraction", "data.whole_word_masking",
               "data.max_ngram", "data.short_sequence_fraction", "data.mean_span_length", "training.seed",
               "training.global_batch_size")  # fmt: skip
_IRRELEVANT = ("run.", "checkpoint.", "logging.", "data.cache_directory", "parallel.timeout_seconds")


def tensors_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """The live tensors of a checkpoint by key."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return tensors | (optimizer.state() if optimizer else {})


def save_checkpoint(
    loaded: LoadedConfig, model: nn.Module, optimizer: Optimizer, iteration: int, plan: dict[str, Any]
) -> Path:
    """Write iteration `iteration`; all ranks call it. An unfinished folder of the same iteration is replaced."""
    folder = Path(loaded.config.run.path, "checkpoints")
    final, partial = folder / f"iter_{iteration:07d}", folder / f"iter_{iteration:07d}.partial"
    with _all_ranks_or_none(f"checkpoint {final} can't be written"):
        if _rank() == 0:
            for old in (partial, final):
                shutil.rmtree(old, ignore_errors=True)
            partial.mkdir(parents=True)
    with _all_ranks_or_none(f"checkpoint {final} can't be written"), _quiet():
        writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
        dcp.save(tensors_of(model, optimizer), storage_writer=writer, no_dist=not dist.is_initialized())
    with _all_ranks_or_none(f"checkpoint {final} can't be written"):
        if _rank() == 0:
            state = {
                "iteration": iteration,
                "config": loaded.config.model_dump(),
                "fusion_plan": plan,
                "versions": {"torch": torch.__version__},
            }
            (partial / STATE).write_text(json.dumps(state, indent=1))
            files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            (partial / MARKER).write_text(json.dumps({"iteration": iteration, "files": files}, indent=1))
            partial.rename(final)
            for old in complete_checkpoints(folder)[: -loaded.config.checkpoint.keep_last]:
                shutil.rmtree(old)
    return final


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """The usable checkpoints of a folder, oldest first."""
    return [path for path in sorted(Path(folder).glob("iter_???????")) if not incompleteness(path)]


def incompleteness(path: Path) -> str:
    """What is missing from a checkpoint, naming the file; "" where it is whole."""
    try:
        files = json.loads((path / MARKER).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{path / MARKER} is missing or damaged ({error}): the checkpoint was not finished"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes, expected {size}"
    return ""


def find_checkpoint(config: RunConfig) -> Path | None:
    """The folder `checkpoint.load` names, or None to start afresh. Raises CheckpointError for one that can't be used."""
    load = config.checkpoint.load
    if load is None:
        return None
    if load == "latest":
        found = complete_checkpoints(Path(config.run.path, "checkpoints"))
        return found[-1] if found else None
    path = Path(load)
    if not path.is_dir():
        raise CheckpointError(f"checkpoint.load: there is no folder {path}")
    if problem := incompleteness(path):
        raise CheckpointError(f"checkpoint.load: {problem}")
    return path


def newest_checkpoint(source: str | Path) -> Path:
    """A checkpoint's folder, or the newest complete one of a run's folder. Raises CheckpointError."""
    path = Path(source)
    if not (path / STATE).is_file():
        found = complete_checkpoints(path / "checkpoints")
        if not found:
            raise CheckpointError(f"{path} is neither a checkpoint nor a run folder with a complete one in checkpoints/")
        path = found[-1]
    if problem := incompleteness(path):
        raise CheckpointError(problem)
    return path


def refuse_to_mix(config: RunConfig, done: int) -> None:
    """Raise CheckpointError where the run's folder holds checkpoints beyond the iteration this job starts from."""
    later = [p.name for p in complete_checkpoints(Path(config.run.path, "checkpoints")) if int(p.name[5:]) > done]
    if later and (config.checkpoint.save_last or config.checkpoint.save_interval):
        raise CheckpointError(
            f"{config.run.path}/checkpoints holds {', '.join(later)}, but this job starts after iteration {done} and would write "
            "among them; choose another run.name, or move them away"
        )


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return json.loads((path / STATE).read_text())


def load_tensors(path: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Fill model (and optimizer) from a checkpoint saved at any parallel size. Keys and shapes must match both ways.

    `optimizer` None leaves the optimizer's tensors of the checkpoint alone.
    """
    tensors = tensors_of(model, optimizer)
    reader = dcp.HuggingFaceStorageReader(str(path))
    with _quiet():
        metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    saved = {key: tuple(value.size) for key, value in metadata.items() if optimizer or key.startswith("model.")}
    expected = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if not LOSS_SCALE & saved.keys() & expected.keys():  # the precision may change
        tensors, saved, expected = (
            {key: value for key, value in found.items() if key not in LOSS_SCALE} for found in (tensors, saved, expected)
        )
    faults = [f"{key} is not in the checkpoint" for key in sorted(expected.keys() - saved.keys())]
    faults += [f"{key} is in the checkpoint but not in the model" for key in sorted(saved.keys() - expected.keys())]
    faults += [
        f"{key} is {list(saved[key])} in the checkpoint, {list(expected[key])} in the model"
        for key in sorted(expected.keys() & saved.keys())
        if saved[key] != expected[key]
    ]
    if faults:
        more = f"\n  … and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise CheckpointError(f"{path} does not fit this model:\n  " + "\n  ".join(faults[:10]) + more)
    with _quiet():
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


class ParameterReader:
    """The parameters of a checkpoint one by one, each whole, whatever parallel sizes it was saved at."""

    def __init__(self, path: Path):
        self._path = path
        with _quiet():
            metadata: dict[str, Any] = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        self._metadata = metadata

    def read(self, name: str) -> Tensor:
        """One parameter. Raises CheckpointError where there is none of that name."""
        key = f"model.{name}"
        if key not in self._metadata:
            raise CheckpointError(f"{key} is not in {self._path}")
        tensor = torch.empty(self._metadata[key].size, dtype=torch.float32)
        with _quiet():
            dcp.load({key: tensor}, storage_reader=dcp.HuggingFaceStorageReader(str(self._path)), no_dist=True)
        return tensor


def compare_configs(saved: dict[str, Any], config: RunConfig, allow_data_change: bool) -> list[str]:
    """The differing keys, as lines to print. Raises CheckpointError where architecture or data order differs.

    The rule: architecture must match; what decides the data order must, unless checkpoint.allow_data_change; everything
    else (optimizer, schedule, dropout, fusions, parallel sizes) comes from the new configuration alone.
    """
    before, now = _flatten(_with_defaults(saved, RunConfig)), _flatten(config.model_dump())
    refused, changed = [], []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old == new or key.startswith(_IRRELEVANT):
            continue
        line = f"{key}: {old} in the checkpoint, {new} now"
        strict = key.startswith(_ARCHITECTURE) or (key.startswith(_DATA_ORDER) and not allow_data_change)
        (refused if strict else changed).append(line)
    if refused:
        raise CheckpointError(
            "this run can't continue from its checkpoint, because these keys differ:\n  "
            + "\n  ".join(refused)
            + "\nSet them back, set checkpoint.load=null to start afresh under another run.name, or, where only data.* and "
            "training.* differ, checkpoint.allow_data_change=true (samples may then repeat or be left out)"
        )
    return changed


def _with_defaults(saved: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """A saved section with the keys that came after it was written: it was trained as their defaults say."""
    filled = dict(saved)
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            filled[name] = _with_defaults(saved.get(name, {}), field.annotation)
        elif name not in saved and not field.is_required():
            filled[name] = field.get_default(call_default_factory=True)
    return filled


def _flatten(tree: dict[str, Any], at: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
    return flat


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def _all_ranks_or_none(what: str) -> Iterator[None]:
    """Run the block on each rank; if it fails on any, raise CheckpointError with that rank's reason on all."""
    reason = ""
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        reason = f"rank {_rank()}: {type(error).__name__}: {error}"
    reasons = [reason]
    if dist.is_initialized():
        reasons = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
    failed = [r for r in reasons if r]
    if failed:
        raise CheckpointError(f"{what}: {failed[0]}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's remarks about single processes and deprecated collectives, which no user can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
