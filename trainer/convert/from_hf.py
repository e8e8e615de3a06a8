"""An HF model's folder -> a checkpoint here, a tensor at a time."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer
from torch import Tensor

from configs.families import t5_lengths
from configs.run import RunConfig
from configs.transformer import FUSION_FLAGS
from fusions.machine import Machine
from fusions.registry import Counters
from models.fusion_sites import fusion_plan
from trainer.checkpoint import MARKER, STATE
from trainer.convert.read_config import read_hf_config
from trainer.convert.rules import Rule, rules_of
from trainer.convert.safetensors_file import SafetensorsFolder, SafetensorsWriter
from trainer.convert.staging import staged
from trainer.data.tokenizer import END_OF_DOCUMENT
from trainer.errors import ConvertError
from trainer.meshes import Meshes
from trainer.setup import make_model

COMPANION_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
                   "merges.txt", "vocab.txt", "spiece.model", "tokenizer.model", "generation_config.json")  # fmt: skip
HF_CONFIG = "hf_config.json"  # kept, so that ids of special tokens and the dtype find the way back
# What files hold beside parameters: buffers of old versions, and a table that old T5 files have by mistake.
_NO_PARAMETERS = re.compile(
    r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq|embeddings\.(position_ids|token_type_ids)"
    r"|EncDecAttention\.relative_attention_bias\.weight)$"
)
# Other names of the same parameter, where the output layer is tied; and in any case; and what a base model's names lack in front.
_TIED = {
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "llama": {"lm_head.weight": "model.embed_tokens.weight"},
    "qwen2": {"lm_head.weight": "model.embed_tokens.weight"},
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "t5": {"lm_head.weight": "shared.weight"},
}
_SAME = {"t5": {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}}
_PREFIXES = {
    "gpt2": ("transformer.", ("wte.", "wpe.", "h.", "ln_f.")),
    "llama": ("model.", ("embed_tokens.", "layers.", "norm.")),
    "qwen2": ("model.", ("embed_tokens.", "layers.", "norm.")),
    "bert": ("bert.", ("embeddings.", "encoder.", "pooler.")),
}


def convert_from_hf(source: str | Path, out: str | Path) -> RunConfig:
    """Write the checkpoint folder `out`; the configuration of the model in it.

    `out` gets the weights (fp32), the state, a config.yaml to train from, and the tokenizer's files. Raises ConvertError for what
    is not supported and for every tensor that is missing, too many, or of another shape; nothing is left behind then.
    """
    source, out = Path(source), Path(out)
    data = read_json(source / "config.json")
    kind = str(data.get("model_type"))
    tensors = _Tensors(SafetensorsFolder(source), kind)
    try:
        sections = read_hf_config(data, sentence_head="cls.seq_relationship.weight" in tensors)
        config = _run_config(*sections, data, source, out)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConvertError(f"{source / 'config.json'} has a value that can't be: {error}") from None
    tensors.resolve(config.model.share_embeddings_and_output_weights)
    rules, shapes = rules_of(config, kind), parameter_shapes(config)
    assert {rule.ours for rule in rules} == set(shapes), {rule.ours for rule in rules} ^ set(shapes)
    tensors.check(rules, shapes)
    with staged(out) as folder:
        with SafetensorsWriter(folder / "shard-00001.safetensors", _keyed(shapes), torch.float32) as writer:
            for rule in rules:
                writer.add(f"model.{rule.ours}", rule.join([tensors.read(name) for name in rule.theirs]))
        for name in COMPANION_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if _found_tokenizer(source) is None and _has_old_tokenizer(kind, source):
            make_tokenizer(kind, source, folder)
        (folder / HF_CONFIG).write_text(json.dumps(data, indent=1))
        (folder / "config.yaml").write_text(_yaml(config, out))
        _finish(folder, config)
    return config


class _Tensors:
    """The tensors of a folder under the names that the rules use."""

    def __init__(self, folder: SafetensorsFolder, kind: str):
        self.folder, self.kind = folder, kind
        self.names = {self._full(name): name for name in folder if not _NO_PARAMETERS.search(name)}

    def _full(self, name: str) -> str:
        """A base model's tensors (GPT2Model, BertModel…) have no prefix; old BERT files say gamma and beta."""
        prefix, first = _PREFIXES.get(self.kind, ("", ()))
        name = prefix + name if name.startswith(first) else name
        return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str) -> Tensor:
        return self.folder.read(self.names[name])

    def resolve(self, tied: bool) -> None:
        """Leave one name of each shared parameter: files may have either, or both. Raises ConvertError where both differ."""
        if self.kind == "bert" and not tied:  # two biases, of which HF reads the decoder's: a file may have only one
            used, unused = "cls.predictions.decoder.bias", "cls.predictions.bias"
            for name, other in ((used, unused), (unused, used)):
                if other in self.names:
                    self.names.setdefault(name, self.names[other])
        same = _SAME.get(self.kind, {}) | (_TIED[self.kind] if tied else {})
        for other, name in same.items():
            if other not in self.names:
                continue
            if name in self.names and not torch.equal(self.read(other), self.read(name)):
                raise ConvertError(
                    f"{other} and {name} differ, but by config.json they are one parameter (tie_word_embeddings)"
                )
            self.names.setdefault(name, self.names.pop(other))
            self.names.pop(other, None)

    def check(self, rules: list[Rule], shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises ConvertError naming each tensor that is missing, too many, or of another shape."""
        faults, wanted = [], set()
        for rule in rules:
            expected = rule.split(torch.empty(shapes[rule.ours], device="meta"))
            for name, part in zip(rule.theirs, expected, strict=True):
                wanted.add(name)
                if name not in self.names:
                    faults.append(f"{name} is missing")
                elif (shape := self.folder.shape(self.names[name])) != tuple(part.shape):
                    faults.append(f"{name} is {list(shape)}, expected {list(part.shape)}")
        faults += [f"{name} is not part of this model" for name in sorted(self.names.keys() - wanted)]
        if faults:
            more = f"\n  … and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise ConvertError(f"{self.folder.folder} does not fit its config.json:\n  " + "\n  ".join(faults[:10]) + more)


def parameter_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of the configured model, without building it in memory."""
    config = config.model_copy(
        update={"transformer": config.transformer.model_copy(update=dict.fromkeys(FUSION_FLAGS, False))}
    )
    plan = fusion_plan(config, Machine("cpu", compile_problem="", torch_version=torch.__version__))
    model = make_model(config, plan, Counters(), Meshes(), torch.device("meta"))
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _keyed(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"model.{name}": shape for name, shape in shapes.items()}


def _found_tokenizer(source: Path) -> str | None:
    return next((name for name in ("tokenizer.json", "spiece.model", "tokenizer.model") if (source / name).is_file()), None)


def _has_old_tokenizer(kind: str, source: Path) -> bool:
    names = {"bert": ("vocab.txt",), "gpt2": ("vocab.json", "merges.txt")}.get(kind, ())
    return bool(names) and all((source / name).is_file() for name in names)


def make_tokenizer(kind: str, source: Path, folder: Path) -> None:
    """Write the tokenizer.json of a model that came with the files from before there were any. Raises ConvertError."""
    try:
        if kind == "bert":
            settings = read_json(source / "tokenizer_config.json") if (source / "tokenizer_config.json").is_file() else {}
            made: Any = BertWordPieceTokenizer(str(source / "vocab.txt"), lowercase=settings.get("do_lower_case", True))
        else:
            made = ByteLevelBPETokenizer(str(source / "vocab.json"), str(source / "merges.txt"))
            made.add_special_tokens([END_OF_DOCUMENT])
    except Exception as error:  # tokenizers raises bare Exception for every fault of a file
        raise ConvertError(f"the tokenizer's files in {source} can't be read: {error}") from None
    made.save(str(folder / "tokenizer.json"))


def _run_config(
    model: dict[str, Any], transformer: dict[str, Any], hf: dict[str, Any], source: Path, out: Path
) -> RunConfig:
    """A whole configuration around the two sections: a place to start from. Raises ConvertError for sizes that can't be."""
    length = min(model["max_position_embeddings"], 1024)
    data: dict[str, Any] = {"train": ["data/train"], "seq_length": length}
    if model["family"] == "t5":
        data["decoder_seq_length"] = min(length, t5_lengths(length, 0.15, 3.0)[1])
    found = _found_tokenizer(source)
    if found or model["family"] != "gpt" or _has_old_tokenizer(str(hf["model_type"]), source):
        data["tokenizer"] = str(out / (found or "tokenizer.json"))
    end = hf.get("eos_token_id")  # Llama 3 has several: the first ends a text
    end = end[0] if isinstance(end, list) and end else end
    if model["family"] == "gpt" and isinstance(end, int) and end < model["vocab_size"]:
        data["eod_token"] = end
    tree = {
        "run": {"name": re.sub(r"[^\w.\-]", "-", out.name) or "converted"},
        "model": model,
        "transformer": transformer,
        "data": data,
        "optimizer": {"learning_rate": 1e-4, "warmup_iters": 100},
        "training": {"train_iters": 1000, "micro_batch_size": 4, "global_batch_size": 4},
        "checkpoint": {"init_from": str(out)},
    }
    config = RunConfig.model_validate(tree)
    if problems := config.problems():
        raise ConvertError("this model can't be built here:\n  " + "\n  ".join(map(str, problems)))
    return config


def _yaml(config: RunConfig, out: Path) -> str:
    tree = {name: values for name, values in config.model_dump(exclude_defaults=True).items() if values}
    head = f"# Starts from the weights in {out}. Set data.train (and data.valid) to your own files.\n"
    return head + yaml.safe_dump(tree, sort_keys=False)


def _finish(folder: Path, config: RunConfig) -> None:
    """The state, and the list of files that makes the checkpoint a complete one."""
    state = {
        "iteration": 0,
        "weights_only": True,
        "config": config.model_dump(),
        "fusion_plan": {},
        "versions": {"torch": torch.__version__},
    }
    (folder / STATE).write_text(json.dumps(state, indent=1))
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / MARKER).write_text(json.dumps({"iteration": 0, "files": files}, indent=1))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConvertError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConvertError(f"{path} can't be read: {error}") from None
    if not isinstance(data, dict):
        raise ConvertError(f"{path} is not a JSON object")
    return data
