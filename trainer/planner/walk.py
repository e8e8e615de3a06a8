"""One real training step as rank 0 of N, on tensors without memory and a process group without processes.

The model, fully_shard, the optimizer and train_step are those of a job; only what tensors hold is missing. Fused operations run
their own autograd functions, so each keeps for its backward what it keeps in a job; their kernels run uncompiled, each as one
operation that moves its inputs and outputs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from configs.run import RunConfig
from fusions import fused_softmax, jit, random
from fusions.catalogue import OPERATIONS
from fusions.machine import Machine
from fusions.registry import Counters, Decision, FusionPlan
from models.fusion_sites import fusion_plan
from models.language_model import LanguageModel
from trainer.communication import CommunicationCounter, Traffic
from trainer.data.batch import Batch
from trainer.data.bert_dataset import BertSample
from trainer.data.families import make_batch
from trainer.data.t5_dataset import T5Sample
from trainer.gradients import local_gradient
from trainer.loop import train_step
from trainer.loss_scale import loss_scaler
from trainer.meshes import Meshes, make_meshes
from trainer.optimizer import Optimizer
from trainer.planner.live import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, LiveTensors
from trainer.planner.work import Operation, StepWork
from trainer.setup import model_without_memory
from trainer.sharding import accumulated_gradients

# Of more micro-batches all but the first and the last are alike.
_WALKED = 3
# Kernels that can't run on a fake tensor, and those of the same operation that can: they keep the same for the backward.
_STAND_INS = ("compile", "addmm", "torch")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Walk:
    """What one rank does in one step."""

    peaks: tuple[dict[str, int], ...]  # bytes by kind at the peak of each half of the step, see LiveTensors.at_peaks
    collectives: list[dict[str, Any]]  # kind, group, ranks, calls, bytes of the whole tensors
    operations: dict[Operation, int]  # (FLOPs, bytes moved) -> calls
    micro_batches: int

    @property
    def memory(self) -> dict[str, int]:
        """Bytes at the peak, by kind."""
        return max(self.peaks, key=lambda memory: sum(memory.values()))

    @property
    def peak(self) -> int:
        """Bytes of all tensors at the peak."""
        return sum(self.memory.values())

    @property
    def flops(self) -> int:
        """Of the matrix products."""
        return sum(flops * calls for (flops, _), calls in self.operations.items())


@contextlib.contextmanager
def fake_processes(world_size: int) -> Iterator[None]:
    """This process as rank 0 of so many, whose collectives do nothing. There must be no process group yet."""
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def walk(config: RunConfig, machine: Machine) -> Walk:
    """A step of the configuration, whose sizes are those of its processes, on a machine of that kind.

    Raises FusionError where a required fusion can't run there.
    """
    plan = walkable(fusion_plan(config, machine))
    with fake_processes(config.parallel.processes):
        meshes = make_meshes(config.parallel, "cpu") if dist.is_initialized() else Meshes()
        config = config.model_copy(update={"training": config.training.model_copy(update={"compile_layers": False})})
        counters = Counters()
        model = model_without_memory(config, plan, counters, meshes, _CPU)
        batch, number = blank_micro_batch(config), config.num_microbatches()
        counts = batch.counts()  # here, since a fake tensor has no sum
        try:
            # What was made outside, like the batch, becomes fake where it is used.
            with FakeTensorMode(allow_non_fake_inputs=True), jit.watch_calls(jit.run_plain):
                model.to_empty(device=_CPU)
                optimizer = Optimizer(model, config.optimizer, plan, counters, loss_scaler(config.training, _CPU))
                if (
                    dist.is_initialized()
                ):  # fully_shard makes its buffers in the first step, DTensor works out its placements
                    train_step(model, optimizer, [MarkedBatch(batch.samples, batch, counts)] * min(number, 2), config, 1)
                watch = _Watch(meshes)

                def begin() -> None:
                    watch.mark()
                    known_gradients(watch.live, optimizer, model)

                batches = [MarkedBatch(batch.samples, batch, counts, begin) for _ in range(min(number, _WALKED))]
                with watch.active(optimizer):
                    train_step(model, optimizer, batches, config, 2)
                known_gradients(watch.live, optimizer, model)
                return watch.result(number)
        finally:
            random.forget_kept_tensors()
            fused_softmax.forget_kept_masks()


def walkable(plan: FusionPlan) -> FusionPlan:
    """The plan with kernels that run on fake tensors; each keeps for its backward what the planned one keeps."""

    def stand_in(decision: Decision) -> Decision:
        operation = OPERATIONS[decision.operation]
        if decision.runs in ("reference", *_STAND_INS):
            return decision
        return replace(decision, runs=next(name for name in _STAND_INS if operation.backend(name)), facts=None)

    return replace(plan, decisions=tuple(stand_in(decision) for decision in plan.decisions))


def known_tensors(live: LiveTensors, optimizer: Optimizer) -> None:
    """Tell what a job holds between steps."""
    live.know(optimizer.parameters, PARAMETERS)
    live.know(optimizer.state().values(), OPTIMIZER_STATE)


def known_gradients(live: LiveTensors, optimizer: Optimizer, model: LanguageModel) -> None:
    """Tell which tensors a step, or a micro-batch of one, has left as gradients."""
    own = [local_gradient(p) for p in optimizer.parameters if p.grad is not None]
    live.know(own + accumulated_gradients(model), GRADIENTS)


class _Watch:
    """The three modes that see a step, and their totals at the beginning of each micro-batch."""

    def __init__(self, meshes: Meshes):
        self.live, self.work, self.traffic = LiveTensors(), StepWork(), CommunicationCounter(meshes)
        self.marks: list[tuple[Counter[Operation], dict[Any, Traffic]]] = []

    @contextlib.contextmanager
    def active(self, optimizer: Optimizer) -> Iterator[None]:
        optimizer.zero_grad()
        known_tensors(self.live, optimizer)
        with self.live, self.work, self.traffic, jit.watch_calls(self._as_one):
            yield

    def mark(self) -> None:
        self.marks.append((self.work.operations.copy(), {c: replace(t) for c, t in self.traffic.found.items()}))

    def result(self, micro_batches: int) -> Walk:
        if micro_batches > _WALKED:
            self._repeat(micro_batches - _WALKED)
        return Walk(self.live.at_peaks(), self.traffic.as_dict(), dict(self.work.operations), micro_batches)

    def _as_one(self, plain: Any, compiled: Any, args: Any, kwargs: Any) -> Any:
        with self.work.as_one_operation((args, kwargs)) as outputs, self.live.as_one_operation():
            outputs.append(plain(*args, **kwargs))
        return outputs[0]

    def _repeat(self, times: int) -> None:
        """Add the second micro-batch, which is between the second mark and the third, so many times."""
        (before, sent_before), (after, sent_after) = self.marks[1:]
        for operation, calls in (after - before).items():
            self.work.operations[operation] += times * calls
        for collective, sent in sent_after.items():
            old, total = sent_before.get(collective, Traffic()), self.traffic.found[collective]
            total.calls += times * (sent.calls - old.calls)
            total.bytes += times * (sent.bytes - old.bytes)


@dataclass(frozen=True)
class MarkedBatch(Batch):
    """A micro-batch that was counted before, and says when it begins."""

    batch: Batch
    counted: dict[str, float]
    begin: Callable[[], None] = lambda: None

    def counts(self) -> dict[str, float]:
        """What was counted."""
        return self.counted

    def to(self, device: torch.device) -> Any:
        """Begin: the batch itself."""
        self.begin()
        return self.batch

    def losses(self, model: Any, keys: Any) -> dict[str, torch.Tensor]:
        """Never asked for."""
        raise NotImplementedError("a step uses what `to` returns")


def blank_micro_batch(config: RunConfig) -> Batch:
    """A micro-batch without any text."""
    micro = config.training.micro_batch_size
    return make_batch([_sample(config) for _ in range(micro)], list(range(micro)), config)


def _sample(config: RunConfig) -> Any:
    s, family = config.data.seq_length, config.model.family

    def zeros(length: int) -> np.ndarray:
        return np.zeros(length, dtype=np.int64)

    if family == "gpt":
        return zeros(s + 1)
    if family == "t5":
        decoder = config.data.decoder_seq_length or s
        return T5Sample(zeros(s), zeros(decoder), zeros(decoder), s)
    return BertSample(zeros(s), zeros(s), zeros(s), s, None if config.model.sentence_head is None else 0)
