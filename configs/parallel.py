"""ParallelConfig: how a job is spread over processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.model import ModelConfig
from configs.section import PositiveInt, Problem, Section


class ParallelConfig(Section):
    """How the job is spread over processes."""

    tensor_parallel_size: PositiveInt = Field(1, description="Processes that share one layer, t.")
    sequence_parallel: bool = Field(False, description="Shard the sequence over the same processes outside the matmuls.")
    data_parallel_size: PositiveInt | None = Field(
        None, description="Groups of t processes, each with samples of its own; null: the processes started / t."
    )
    data_sharding: Literal["none", "optimizer", "full"] = Field(
        "none",
        description="What is split over data-parallel ranks (fully_shard): nothing; optimizer state, gradients and fp32 "
        "parameters at rest (ZeRO-2); also the parameters of every layer that isn't at work (ZeRO-3).",
    )
    data_shard_size: PositiveInt | None = Field(
        None,
        description="Data-parallel ranks that share one copy; the copies are kept equal (HSDP). null: all of them.",
    )
    timeout_seconds: PositiveInt = Field(600, description="A collective that waits longer than this ends the job.")

    @property
    def data_parallel(self) -> int:
        """The data-parallel size; 1 where it isn't known yet."""
        return self.data_parallel_size or 1

    @property
    def processes(self) -> int:
        """Processes of the job, as far as the configuration says."""
        return self.tensor_parallel_size * self.data_parallel

    @property
    def shard_size(self) -> int:
        """Data-parallel ranks that share one copy of what `data_sharding` splits."""
        return 1 if self.data_sharding == "none" else self.data_shard_size or self.data_parallel


def parallel_problems(
    parallel: ParallelConfig, model: ModelConfig, seq_length: int, world_size: int | None
) -> list[Problem]:
    """Every conflict of the parallel sizes with each other, the vocabulary, the sequence, and the processes started."""
    found = []
    padded, s, t = model.padded_vocab_size, seq_length, parallel.tensor_parallel_size
    if padded % t:
        found.append(
            Problem(
                "model.make_vocab_size_divisible_by",
                f"vocab_size {model.vocab_size} padded to a multiple of "
                f"{model.make_vocab_size_divisible_by} is {padded}, which is not divisible by "
                f"parallel.tensor_parallel_size {t}; choose a multiple of {t}",
            )
        )
    if parallel.sequence_parallel and t == 1:
        found.append(
            Problem("parallel.sequence_parallel", "is true at tensor_parallel_size 1, where there is nothing to shard")
        )
    if parallel.sequence_parallel and s % t:
        found.append(
            Problem(
                "data.seq_length",
                f"{s} is not divisible by parallel.tensor_parallel_size {t}, which parallel.sequence_parallel needs",
            )
        )
    return found + _process_problems(parallel, world_size) + _sharding_problems(parallel)


def _process_problems(parallel: ParallelConfig, world_size: int | None) -> list[Problem]:
    if world_size is None:
        return []
    given, t = parallel.data_parallel_size, parallel.tensor_parallel_size
    started = f"{world_size} process{'es were' if world_size != 1 else ' was'} started"
    if world_size % t:
        return [
            Problem(
                "parallel.tensor_parallel_size",
                f"is {t} but {started}, which is no multiple of it; start {t} processes (torchrun --nproc-per-node {t}) or "
                f"a multiple, or set parallel.tensor_parallel_size to a divisor of {world_size}",
            )
        ]
    if given is not None and given * t != world_size:
        return [
            Problem(
                "parallel.data_parallel_size",
                f"is {given} (x tensor_parallel_size {t}: {given * t} processes), but {started}; start {given * t}, or set "
                f"parallel.data_parallel_size={world_size // t} (null takes what is started)",
            )
        ]
    return []


def _sharding_problems(p: ParallelConfig) -> list[Problem]:
    if p.data_shard_size is None:
        return []
    if p.data_sharding == "none":
        return [
            Problem(
                "parallel.data_shard_size",
                f"is {p.data_shard_size}, but data_sharding none splits nothing; set it to null, or data_sharding to "
                "optimizer or full",
            )
        ]
    if p.data_parallel_size is not None and p.data_parallel_size % p.data_shard_size:
        return [
            Problem(
                "parallel.data_shard_size",
                f"{p.data_shard_size} does not divide the data-parallel size {p.data_parallel_size}: copies x "
                "data_shard_size must be that",
            )
        ]
    return []
