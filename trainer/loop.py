"""STEP, a circle in one room: batch -> model -> loss per token -> backward -> reduce -> clip -> optimizer -> metrics.

Nothing in a step reads a tensor on the host; the counted tokens are known before the batch goes to the device.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from configs.run import RunConfig
from fusions import jit
from fusions.random import DropoutKeys, site_words
from models.language_model import LanguageModel
from trainer.checkpoint import (
    compare_configs,
    find_checkpoint,
    load_tensors,
    newest_checkpoint,
    read_state,
    refuse_to_mix,
    save_checkpoint,
)
from trainer.communication import CommunicationCounter
from trainer.data.batch import Batch, total_counts
from trainer.data.families import training_set, validation_set
from trainer.data.sampler import training_batches, validation_batches
from trainer.data.sources import ValidationSet
from trainer.errors import CheckpointError
from trainer.gradients import norm_and_sums, reduce_partial_gradients, sum_over_data
from trainer.lr_schedule import learning_rate
from trainer.meshes import any_rank, world_size
from trainer.metrics import Metrics, StepResult
from trainer.optimizer import Optimizer
from trainer.records import plot_losses
from trainer.setup import Job, describe, write_description
from trainer.sharding import free_whole_parameters, sync_gradients

# What a profile of a step shows beside the operations themselves.
PHASES = FORWARD, BACKWARD, GRADIENTS, OPTIMIZER = "forward", "backward", "reduce gradients, norm", "optimizer"


def train_step(
    model: LanguageModel, optimizer: Optimizer, batches: Sequence[Batch], config: RunConfig, iteration: int
) -> StepResult:
    """One optimizer step over the micro-batches of a global batch.

    Each loss of the family is the sum over what it counts / their number over the whole global batch, however it is cut up; what
    is minimised is their sum. A gradient that is not finite, or a batch that counts nothing, changes nothing and is marked as
    skipped.
    """
    optimizer.zero_grad()
    scaler = optimizer.scaler
    # Small copies from the host are not waited for: the driver has them before the call returns.
    words = site_words(config.training.seed, iteration, model.num_dropout_sites).to(model.device, non_blocking=True)
    names, counts = count_tokens(batches, model)
    parts, t = torch.zeros_like(counts), model.tp.size
    for number, batch in enumerate(batches, 1):
        sync_gradients(model, last=number == len(batches), full=config.parallel.data_sharding == "full")
        with record_function(FORWARD):
            batch = batch.to(model.device)
            sums = batch.losses(model, DropoutKeys(words, batch.samples))
            means = torch.stack([sums[name] for name in names]) / counts.clamp(min=1.0)
            loss = means.sum() if scaler is None else means.sum() * scaler.scale
        with record_function(BACKWARD):
            loss.backward()
        parts += means.detach()
    with record_function(GRADIENTS):
        reduce_partial_gradients(optimizer.partial, model.tp.group)
        norm, parts = norm_and_sums(optimizer.parameters, parts, t)
    total, scale = parts.sum(), None
    if scaler is not None:
        scale = scaler.scale.clone()
        norm = norm / scale
    skip = torch.logical_not(torch.isfinite(norm) & torch.isfinite(total) & (counts.sum() > 0)).float()
    rate = learning_rate(config, iteration)
    with record_function(OPTIMIZER):
        optimizer.step(rate, norm, skip)
    if scaler is not None:
        scaler.update(torch.logical_not(torch.isfinite(norm)))
    named = dict(zip(names, parts, strict=True)) if len(names) > 1 else {}
    return StepResult(total, norm, skip, rate, named, scale)


def count_tokens(batches: Sequence[Batch], model: LanguageModel) -> tuple[list[str], torch.Tensor]:
    """The names of the family's losses, and what each is over in the whole global batch: fp32 [losses], on the device."""
    counts = total_counts(batches)
    return list(counts), sum_over_data(torch.tensor([*counts.values()]).to(model.device, non_blocking=True), model.tp.size)


@torch.no_grad()
def evaluate(model: LanguageModel, dataset: ValidationSet, config: RunConfig, data_rank: int = 0) -> float:
    """The loss over the validation samples, without dropout; the same every time, shared out to the data-parallel ranks."""
    model.eval()
    totals: dict[str, torch.Tensor] = {}
    for batch in validation_batches(dataset, config, data_rank):
        counts = batch.counts()
        for name, total in batch.to(model.device).losses(model, None).items():
            pair = torch.stack([total.double(), torch.tensor(counts[name], dtype=torch.float64, device=model.device)])
            totals[name] = totals[name] + pair if name in totals else pair
    free_whole_parameters(model)
    model.train()
    sums = sum_over_data(torch.stack(list(totals.values())), model.tp.size)
    return sum(total / max(count, 1.0) for total, count in sums.tolist())


class _Stop:
    """SIGTERM asks for a stop after the iteration; ranks agree on which, since the signal may reach only one."""

    def __init__(self, enabled: bool):
        self.enabled, self._asked = enabled, False
        if enabled:
            signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def now(self) -> bool:
        """Whether any rank was asked to stop; every rank must call it."""
        return self.enabled and any_rank(self._asked)


def train(job: Job) -> float | None:
    """Run the job to its end, or to a SIGTERM. Returns the last validation loss, None where there is none."""
    config, log = job.config, job.log
    describe(job)
    done = _resume(job)
    write_description(job)
    dataset = training_set(config)
    for line in dataset.describe(config.training.train_iters * config.training.global_batch_size):
        log.line(f"data: {line}")
    valid = _checked_validation_set(config)
    stop = _Stop(config.checkpoint.save_on_signal)
    metrics = Metrics(config, job.device, job.counters, log, world_size(), job.gemm_rate)
    validation_loss = None
    metrics.resume()
    for iteration in range(done + 1, config.training.train_iters + 1):
        batches = training_batches(dataset, config, iteration, job.meshes.data_rank)
        counting = config.logging.communication and iteration == done + 2
        with CommunicationCounter(job.meshes) if counting else contextlib.nullcontext() as communication:
            result = train_step(job.model, job.optimizer, batches, config, iteration)
        if communication is not None:
            communication.show(log, iteration)
        metrics.record(iteration, result)
        last, stopping = iteration == config.training.train_iters, stop.now()
        saving = stopping or _due(iteration, config.checkpoint.save_interval) or (last and config.checkpoint.save_last)
        unseen = valid if not stopping and (last or _due(iteration, config.training.eval_interval)) else None
        pausing = saving or unseen is not None
        if pausing:  # not at every step: stopping the clock waits for the device
            metrics.pause()
        if saving:
            metrics.flush()
            folder = save_checkpoint(job.loaded, job.model, job.optimizer, iteration, job.plan.as_dict())
            log.line(f"iteration {iteration:>6}  checkpoint {folder}")
        if unseen is not None:
            validation_loss = evaluate(job.model, unseen, config, job.meshes.data_rank)
            metrics.validation(iteration, validation_loss)
        if pausing:
            metrics.resume()
        if stopping and not last:
            log.line(f"SIGTERM: stopped after iteration {iteration}; start the same command again to go on")
            break
    metrics.close()
    _finish(job, metrics)
    return validation_loss


def _checked_validation_set(config: RunConfig) -> ValidationSet | None:
    """What is to be validated on, if anything; read once, since a bad token must not end a run at its first validation."""
    if not (config.data.valid and config.training.eval_iters):
        return None
    valid = validation_set(config)
    for number in range(min(len(valid), config.training.eval_iters * config.training.global_batch_size)):
        _ = valid[number]
    return valid


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


def _resume(job: Job) -> int:
    """Load the checkpoint the configuration names; the iterations done before."""
    config, log = job.config, job.log
    path = find_checkpoint(config)
    done = int(read_state(path)["iteration"]) if path else 0
    refuse_to_mix(config, done)
    if path is None:
        return _start_from_weights(job)
    state = read_state(path)
    if state.get("weights_only"):
        raise CheckpointError(f"{path} has weights only, nothing to resume; start from it with checkpoint.init_from={path}")
    changed = compare_configs(state["config"], config, config.checkpoint.allow_data_change)
    for line in changed:
        log.line(f"resume: {line}")
    load_tensors(path, job.model, job.optimizer)
    log.line(f"resumed from {path}: {done} iterations done")
    if done > config.training.train_iters:
        raise CheckpointError(f"{path} has {done} iterations, more than training.train_iters {config.training.train_iters}")
    return done


def _start_from_weights(job: Job) -> int:
    """Take the weights of `checkpoint.init_from`, if there is one; iteration 0 either way."""
    source = job.config.checkpoint.init_from
    if source is not None:
        path = newest_checkpoint(source)
        compare_configs(read_state(path)["config"], job.config, allow_data_change=True)
        load_tensors(path, job.model, None)
        job.log.line(f"weights from {path}")
    return 0


def _finish(job: Job, metrics: Metrics) -> None:
    """The summary: speed, what each fusion site really ran, the picture."""
    log = job.log
    rows = [
        (
            flag,
            site,
            str(counts.fused),
            str(counts.reference),
            str(counts.recomputed),
            "; ".join(f"{n} x {why}" for why, n in counts.fallbacks.items()),
        )
        for (flag, site), counts in job.counters.sites.items()
    ]
    log.table("Calls of each fusion site", ("fusion", "site", "fused", "reference", "recomputed", "fallbacks"), rows)
    built = jit.graphs()
    again = {name: number - 1 for name, number in built.items() if number > 1}
    words = f" ({', '.join(f'{name} {number}' for name, number in sorted(again.items()))})" if again else ""
    log.line(f"compiled graphs {sum(built.values())}, of which recompiles {sum(again.values())}{words}")
    trained = metrics.median_iteration_ms()
    if trained is not None:
        for decision in job.counters.never_called(job.plan):
            log.line(f"FAULT: {decision.flag} at {decision.site} is active ({decision.runs}) but was called zero times")
        log.line(f"median iteration {trained:.1f} ms; peak memory and all figures in {job.config.run.path}/metrics.jsonl")
    if not log.silent and Path(job.config.run.path, "metrics.jsonl").stat().st_size:
        log.line(f"loss curve {plot_losses(job.config.run.path)}")
    if dist.is_initialized():
        dist.barrier()
