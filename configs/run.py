"""RunConfig: the whole description of a pretraining job, section by section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from configs.families import family_problems
from configs.model import ModelConfig, rotary_dim
from configs.parallel import ParallelConfig, parallel_problems
from configs.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Problem,
    Section,
)
from configs.transformer import FusionValue, TransformerConfig, fusion_flag


class RunSection(Section):
    """What the run is called, where it writes, what it runs on."""

    name: str = Field(description="Name of the run; everything it writes is under runs/<name>/.", pattern=r"^\w[\w.\-]*$")
    directory: str | None = Field(None, description="Folder of the run instead of runs/<name>.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one, else cpu.")
    threads: PositiveInt | None = Field(None, description="CPU threads of one process; null: the cores, shared out.")

    @property
    def path(self) -> str:
        """The folder everything of this run is written to."""
        return self.directory or f"runs/{self.name}"


class DataSource(Section):
    """One .bin/.idx pair and its share of the samples."""

    prefix: str = Field(description="Path without .bin/.idx.")
    weight: NonNegativeFloat = Field(1.0, description="Share of the samples, relative to the other sources.")


class DataConfig(Section):
    """What the model reads."""

    train: list[str | DataSource] = Field(description="Training data: prefixes, or {prefix, weight}.", min_length=1)
    valid: list[str | DataSource] = Field(default_factory=list, description="Validation data, the same way.")
    tokenizer: str | None = Field(
        None, description="tokenizer.json of HF tokenizers, or a SentencePiece .model; gpt needs it for generate.py only."
    )
    seq_length: PositiveInt = Field(description="Tokens of one sample, s; t5: of the encoder.")
    decoder_seq_length: PositiveInt | None = Field(None, description="t5: tokens of one sample in the decoder.")
    masked_fraction: Probability = Field(0.15, gt=0, description="bert, t5: share of the tokens that are to be predicted.")
    whole_word_masking: bool = Field(False, description="bert: all pieces of a word are masked together.")
    max_ngram: PositiveInt = Field(
        1, description="bert: longest run of words (or tokens) masked together; n has weight 1/n."
    )
    short_sequence_fraction: Probability = Field(
        0.1, description="bert: share of the samples that aim at a random shorter length."
    )
    mean_span_length: PositiveFloat = Field(3.0, ge=1, description="t5: tokens that one sentinel stands for, on average.")
    eod_token: NonNegativeInt | None = Field(None, description="End-of-document id; needed by the three keys below.")
    reset_position_ids: bool = Field(False, description="Positions start again after an end of document.")
    reset_attention_mask: bool = Field(False, description="No attention across an end of document.")
    eod_mask_loss: bool = Field(False, description="No loss where the input token is the end of a document.")
    cache_directory: str | None = Field(None, description="Folder of the sample index; <run directory>/cache when null.")

    def sources(self, split: Literal["train", "valid"]) -> list[DataSource]:
        """The sources of a split, each with its weight."""
        return [s if isinstance(s, DataSource) else DataSource(prefix=s, weight=1.0) for s in getattr(self, split)]


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay, and the learning-rate schedule."""

    learning_rate: PositiveFloat = Field(description="Peak learning rate.")
    min_learning_rate: NonNegativeFloat = Field(0.0, description="Learning rate at the end of the decay.")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field("cosine", description="Shape after the warm-up.")
    warmup_iters: NonNegativeInt = Field(0, description="Iterations of linear warm-up from 0.")
    decay_iters: PositiveInt | None = Field(None, description="Iteration at which the decay ends; train_iters when null.")
    wsd_decay_iters: PositiveInt | None = Field(None, description="Length of the final decay of wsd (iterations).")
    weight_decay: NonNegativeFloat = Field(0.01, description="Decoupled; applies to matrices and embeddings only.")
    betas: list[Probability] = Field([0.9, 0.95], min_length=2, max_length=2, description="Adam's two decay rates.")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Largest global gradient norm; 0: no clipping.")
    fusion: FusionValue = fusion_flag("AdamW over all parameters at once.", default=True)


class LossScaleConfig(Section):
    """The factor on the loss of an fp16 run."""

    initial: PositiveFloat = Field(65536.0, description="At the first iteration.")
    growth_factor: PositiveFloat = Field(2.0, ge=1, description="By which it grows.")
    growth_interval: PositiveInt = Field(1000, description="Iterations in a row without an overflow after which it grows.")
    backoff_factor: PositiveFloat = Field(0.5, le=1, description="By which it falls after overflows.")
    hysteresis: PositiveInt = Field(2, description="Overflows since it last grew until each one makes it fall.")
    minimum: PositiveFloat = Field(1.0, description="It never falls below this.")


class TrainingConfig(Section):
    """The loop."""

    train_iters: PositiveInt = Field(description="Optimizer steps.")
    micro_batch_size: PositiveInt = Field(description="Samples of one forward pass on one data-parallel rank, b.")
    global_batch_size: PositiveInt = Field(description="Samples of one optimizer step over all ranks.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Of the computation; parameters at rest and sums of gradients are fp32; fp16 scales its loss."
    )
    loss_scale: LossScaleConfig = Field(
        default_factory=lambda: LossScaleConfig.model_validate({}), description="fp16: the factor on the loss."
    )
    seed: NonNegativeInt = Field(1234, lt=2**63, description="Of weights, data order and dropout masks.")
    eval_interval: PositiveInt | None = Field(None, description="Iterations between validations; null: only at the end.")
    eval_iters: NonNegativeInt = Field(10, description="Global batches of one validation; 0: none.")
    compile_layers: bool = Field(
        False,
        description="torch.compile of every transformer layer as a whole, with the fusions that the flags chose in it.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations that the backward computes again instead of keeping them: none; what is large and cheap "
        "(unfused attention's scores and softmax, the MLP's activation, norms); all of a layer but its input.",
    )
    recompute_num_layers: PositiveInt | None = Field(
        None, description="Only in so many layers of each stack, the first ones (a block); null: in all."
    )
    max_nonfinite_iters: PositiveInt = Field(
        10, description="End the job after this many iterations in a row whose gradient is not finite (each is skipped)."
    )


class CheckpointConfig(Section):
    """What is kept on disk."""

    save_interval: PositiveInt | None = Field(None, description="Iterations between checkpoints; null: only at the end.")
    save_last: bool = Field(True, description="Write a checkpoint after the last iteration.")
    keep_last: PositiveInt = Field(2, description="Checkpoints kept; older ones are removed.")
    load: str | None = Field(
        "latest", description="latest: the newest complete one of this run, if any; a folder: that one; null: start afresh."
    )
    init_from: str | None = Field(
        None,
        description="A checkpoint (or run folder) whose weights a new run starts from, without its optimizer state and place in "
        "the data. Not looked at where `load` finds one.",
    )
    allow_data_change: bool = Field(
        False, description="Resume although data, seq_length, seed or batch size differ (samples may repeat or be left out)."
    )
    save_on_signal: bool = Field(True, description="SIGTERM: finish the iteration, save, exit 0. false: die at once.")


class WandbConfig(Section):
    """Weights & Biases; needs the extra `wandb`."""

    mode: Literal["disabled", "offline", "online"] = Field("disabled", description="disabled: wandb isn't imported.")
    project: str = Field("fuseline", description="Project the run is filed under.")


class LoggingConfig(Section):
    """What is reported."""

    log_interval: PositiveInt = Field(10, description="Iterations between console lines; losses are recorded for each.")
    communication: bool = Field(
        False,
        description="Count the collectives of the second iteration after a start, by kind, group and bytes, and show them.",
    )
    wandb: WandbConfig = Field(default_factory=lambda: WandbConfig.model_validate({}), description="Weights & Biases.")


class RunConfig(Section):
    """Everything a job is made of."""

    run: RunSection
    model: ModelConfig
    transformer: TransformerConfig
    parallel: ParallelConfig = Field(
        default_factory=lambda: ParallelConfig.model_validate({}), description="How the job is spread over processes."
    )
    data: DataConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig = Field(
        default_factory=lambda: CheckpointConfig.model_validate({}), description="What is kept on disk."
    )
    logging: LoggingConfig = Field(default_factory=lambda: LoggingConfig.model_validate({}), description="What is reported.")

    def num_microbatches(self) -> int:
        """Forward passes of one optimizer step on one rank: global batch / (micro batch x data-parallel size)."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.parallel.data_parallel)

    def for_processes(self, world_size: int) -> RunConfig:
        """The configuration of a job of so many processes: `parallel.data_parallel_size` filled in."""
        if self.parallel.data_parallel_size is not None:
            return self
        size = max(1, world_size // self.parallel.tensor_parallel_size)
        return self.model_copy(update={"parallel": self.parallel.model_copy(update={"data_parallel_size": size})})

    def problems(self, world_size: int | None = None) -> list[Problem]:
        """Every conflict between fields; `world_size` is the number of processes started, if known."""
        t = self.parallel.tensor_parallel_size
        return [
            *self.transformer.problems(t),
            *parallel_problems(self.parallel, self.model, self.data.seq_length, world_size),
            *self._position_problems(),
            *family_problems(self),
            *self._batch_problems(),
            *self._data_problems(),
            *self._schedule_problems(),
            *self._recompute_problems(),
            *self._logging_problems(),
        ]

    def _logging_problems(self) -> list[Problem]:
        if self.logging.communication and self.training.compile_layers:
            text = "is true with training.compile_layers, and what a compiled layer sends can't be seen; set one of them to false"
            return [Problem("logging.communication", text)]
        return []

    def _recompute_problems(self) -> list[Problem]:
        mode, layers = self.training.recompute, self.training.recompute_num_layers
        if mode == "selective" and self.training.compile_layers:
            return [
                Problem(
                    "training.recompute",
                    "is selective with compile_layers, where the compiler decides what inside a layer is kept; set it to full or "
                    "none, or compile_layers to false",
                )
            ]
        if layers is not None and mode == "none":
            return [Problem("training.recompute_num_layers", f"is {layers}, but recompute is none; set one of them")]
        most = max(self.transformer.num_layers, self.model.decoder_num_layers or 0)
        if layers is not None and layers > most:
            return [Problem("training.recompute_num_layers", f"{layers} is more than the {most} layers there are")]
        return []

    def _position_problems(self) -> list[Problem]:
        found = []
        if self.data.seq_length > self.model.max_position_embeddings:
            found.append(
                Problem(
                    "data.seq_length",
                    f"{self.data.seq_length} is longer than model.max_position_embeddings "
                    f"{self.model.max_position_embeddings}",
                )
            )
        if self.model.position_embedding_type == "rope":
            head, rotary = self.transformer.head_size, rotary_dim(self.model, self.transformer)
            if rotary % 2 or rotary == 0:
                found.append(
                    Problem(
                        "model.rotary_percent",
                        f"rotates {rotary} of the {head} dimensions of a head; the number must be even and above 0 "
                        "(change transformer.head_dim, the head count or rotary_percent)",
                    )
                )
        scaling = self.model.rope_scaling
        if scaling is not None and scaling.type != "linear" and scaling.original_max_position_embeddings is None:
            found.append(
                Problem("model.rope_scaling.original_max_position_embeddings", f"is null but {scaling.type} needs it")
            )
        if scaling is not None and self.model.position_embedding_type != "rope":
            found.append(
                Problem("model.rope_scaling", f"has no meaning with {self.model.position_embedding_type} positions")
            )
        return found

    def _batch_problems(self) -> list[Problem]:
        micro, batch, dp = self.training.micro_batch_size, self.training.global_batch_size, self.parallel.data_parallel
        at_once = micro * dp
        if batch % at_once == 0:
            return []
        nearest = " and ".join(str(n * at_once) for n in (batch // at_once, batch // at_once + 1) if n)
        return [
            Problem(
                "training.global_batch_size",
                f"{batch} is not micro_batch_size {micro} x a whole number of accumulation steps x data-parallel size {dp}; "
                f"nearest: {nearest}",
            )
        ]

    def _data_problems(self) -> list[Problem]:
        found = []
        needs_eod = [k for k in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(self.data, k)]
        if needs_eod and self.data.eod_token is None:
            found.append(Problem("data.eod_token", f"is null but {', '.join(needs_eod)} need it"))
        if self.data.eod_token is not None and self.data.eod_token >= self.model.vocab_size:
            found.append(
                Problem("data.eod_token", f"{self.data.eod_token} is not below model.vocab_size {self.model.vocab_size}")
            )
        for split in ("train", "valid"):
            sources = self.data.sources(split)
            if sources and sum(s.weight for s in sources) <= 0:
                found.append(Problem(f"data.{split}", "all weights are 0; at least one must be above 0"))
        return found

    def _schedule_problems(self) -> list[Problem]:
        o, found = self.optimizer, []
        end = o.decay_iters or self.training.train_iters
        if o.min_learning_rate > o.learning_rate:
            found.append(
                Problem(
                    "optimizer.min_learning_rate",
                    f"{o.min_learning_rate} is above optimizer.learning_rate {o.learning_rate}",
                )
            )
        if o.schedule != "constant" and o.warmup_iters >= end:
            found.append(
                Problem("optimizer.warmup_iters", f"{o.warmup_iters} leaves nothing of the {end} iterations to decay in")
            )
        if o.schedule == "wsd" and o.wsd_decay_iters is None:
            found.append(Problem("optimizer.wsd_decay_iters", "is null but schedule wsd needs the length of its decay"))
        if o.schedule == "wsd" and (o.wsd_decay_iters or 0) + o.warmup_iters > end:
            found.append(
                Problem(
                    "optimizer.wsd_decay_iters",
                    f"{o.wsd_decay_iters} and warmup_iters {o.warmup_iters} do not fit in {end} iterations",
                )
            )
        return found


def json_schema() -> dict[str, Any]:
    """The JSON schema of a run's YAML, for editors."""
    return RunConfig.model_json_schema()
