"""HF models here and back: bit for bit, with their logits, losses and gradients. C14 C15 C16 C17 N08 N25 N27 N28."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from configs.run import RunConfig
from fusions.machine import probe
from models.fusion_sites import fusion_plan
from models.tensor_parallel.params import TensorParallel
from tests.distributed import run_ranks
from tests.numerics import relative
from tests.trainer.convert.hf_models import MODELS, VOCABULARY, batch, family, hf_forward, load, our_forward, save
from trainer.checkpoint import load_tensors, read_state
from trainer.convert.from_hf import convert_from_hf
from trainer.convert.rules import rules_of
from trainer.convert.to_hf import convert_to_hf
from trainer.convert.write_config import hf_type_of
from trainer.errors import ConvertError
from trainer.gradients import partial_parameters, reduce_partial_gradients
from trainer.meshes import Meshes
from trainer.setup import build_model

TOLERANCE = 1e-5


def compare(name: str, hf_folder: str, checkpoint: str, backend: str = "unfused") -> dict[str, float]:
    """The largest relative differences of our model to HF's; at tensor-parallel size > 1 with sequence parallel."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    tp = TensorParallel(init_device_mesh("cpu", (size,)), True) if size > 1 else TensorParallel()
    saved = read_state(Path(checkpoint))["config"]
    saved["parallel"] |= {"tensor_parallel_size": size, "sequence_parallel": size > 1}
    saved["transformer"] |= {"attention_backend": backend, "attention_dropout": 0.0}
    config = RunConfig.model_validate(saved)
    assert config.problems() == []
    model, _ = build_model(config, fusion_plan(config, probe("cpu")), Meshes(tp), torch.device("cpu"))
    load_tensors(Path(checkpoint), model, None)
    data, theirs = batch(family(name)), load(Path(hf_folder))
    ours, expected = our_forward(model.eval(), name, data), hf_forward(theirs, name, data)
    for result in (ours, expected):
        result["loss"].backward()
    reduce_partial_gradients(partial_parameters(model), model.tp.group)
    found = {"loss": abs(ours["loss"].item() / expected["loss"].item() - 1)}
    logits = ours["logits"] if size == 1 else torch.cat(_gather(ours["logits"]), -1)
    real = data["decoder_real"] if family(name) == "t5" else data["real"]
    counted = real & (torch.arange(len(real)) != 4)[:, None]
    found["logits"] = relative(logits[..., :VOCABULARY][counted].detach(), expected["logits"][counted].detach())
    if "sentence" in expected:
        found["sentence"] = relative(ours["sentence"][:4].detach(), expected["sentence"][:4].detach())
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    total = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    mine = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    for rule in rules_of(config, hf_type_of(config)):
        used = [n for n in rule.theirs if name != "bert-untied" or n != "cls.predictions.bias"]
        wanted = rule.join([gradients[hf_name(n, gradients)] for n in used])
        found[f"gradient of {rule.ours}"] = relative(mine.pop(rule.ours), wanted, total)
    assert not mine
    return found


def hf_name(name: str, parameters: dict[str, Any]) -> str:
    """HF lists a shared parameter under one of its names."""
    return name if name in parameters else {"cls.predictions.bias": "cls.predictions.decoder.bias"}[name]


def _gather(part: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return parts


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (HF folder, checkpoint), made when first asked for."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save(name, folder / "hf")
            convert_from_hf(folder / "hf", folder / "ours")
            made[name] = folder / "hf", folder / "ours"
        return made[name]

    return make


@pytest.mark.parametrize("backend", ["unfused", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_C16_C17_N08_N28_the_same_logits_loss_and_gradients(name: str, backend: str, converted: Any) -> None:
    found = compare(name, *map(str, converted(name)), backend)
    assert {what: value for what, value in found.items() if value > TOLERANCE} == {}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "t5-untied"])
def test_the_same_at_two_ranks_with_sequence_parallel(name: str, converted: Any) -> None:
    for found in run_ranks(2, compare, name, *map(str, converted(name))):
        assert {what: value for what, value in found.items() if value > TOLERANCE} == {}


@pytest.mark.parametrize("name", MODELS)
def test_C14_C15_here_and_back_bit_for_bit(name: str, converted: Any, tmp_path: Path) -> None:
    import transformers

    hf, checkpoint = converted(name)
    convert_to_hf(checkpoint, tmp_path / "back")
    before, after = load(hf).state_dict(), load(tmp_path / "back").state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    original, exported = (load_file(f / "model.safetensors") for f in (hf, tmp_path / "back"))
    assert original.keys() == exported.keys() and all(
        torch.equal(original[n], exported[n]) for n in original
    )  # no padded rows
    model, report = getattr(transformers, type(load(hf)).__name__).from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    ours = json.loads((tmp_path / "back" / "config.json").read_text())
    theirs = json.loads((hf / "config.json").read_text())
    assert ours["tie_word_embeddings"] == theirs["tie_word_embeddings"]
    auto = transformers.AutoModelForSeq2SeqLM if name.startswith("t5") else (
        transformers.AutoModelForMaskedLM if name.startswith("bert") else transformers.AutoModelForCausalLM)  # fmt: skip
    assert auto.from_pretrained(tmp_path / "back").num_parameters() > 0


def test_N28_one_table_of_relative_positions_a_stack(converted: Any, tmp_path: Path) -> None:
    convert_to_hf(converted("t5")[1], tmp_path / "back")
    names = [n for n in load_file(tmp_path / "back" / "model.safetensors") if "relative_attention_bias" in n]
    assert names == [f"{s}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for s in ("encoder", "decoder")]


def test_bf16_comes_back_as_it_was_and_shards_have_an_index(tmp_path: Path) -> None:
    save("llama", tmp_path / "fp32").to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    convert_from_hf(tmp_path / "hf", tmp_path / "ours")
    convert_to_hf(tmp_path / "ours", tmp_path / "back", shard_bytes=100_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = {f.name: load_file(f) for f in (tmp_path / "back").glob("*.safetensors")}
    assert len(files) > 2 and {n: f for f, tensors in files.items() for n in tensors} == index["weight_map"]
    before = load_file(tmp_path / "hf" / "model.safetensors")
    for name, file in index["weight_map"].items():
        assert files[file][name].dtype == torch.bfloat16 and torch.equal(files[file][name], before[name])
    convert_from_hf(tmp_path / "back", tmp_path / "again")  # from shards
    a, b = (load_file(tmp_path / f / "shard-00001.safetensors") for f in ("ours", "again"))
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_N25_a_zero_centred_gamma_is_exported_as_hf_means_it(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    convert_from_hf(tmp_path / "hf", tmp_path / "ours")
    state = json.loads((tmp_path / "ours" / "state.json").read_text())
    state["config"]["transformer"]["layernorm_zero_centered_gamma"] = True
    (tmp_path / "ours" / "state.json").write_text(json.dumps(state))
    tensors = load_file(tmp_path / "ours" / "shard-00001.safetensors")
    save_file(
        {n: torch.zeros_like(t) if "norm" in n else t for n, t in tensors.items()},
        tmp_path / "ours" / "shard-00001.safetensors",
    )
    marker = json.loads((tmp_path / "ours" / "complete.json").read_text())
    for name in marker["files"]:
        marker["files"][name] = (tmp_path / "ours" / name).stat().st_size
    (tmp_path / "ours" / "complete.json").write_text(json.dumps(marker))
    convert_to_hf(tmp_path / "ours", tmp_path / "back")
    norms = [t for n, t in load_file(tmp_path / "back" / "model.safetensors").items() if "norm" in n]
    assert len(norms) == 7 and all(torch.equal(t, torch.ones_like(t)) for t in norms)


def test_never_two_copies_of_a_model_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gc
    import weakref

    from trainer.checkpoint import ParameterReader
    from trainer.convert.safetensors_file import SafetensorsFolder

    save("t5", tmp_path / "hf")
    alive: list[weakref.ref] = []
    most = 0

    def watched(original: Any) -> Any:
        def read(self: Any, name: str) -> torch.Tensor:
            nonlocal most
            tensor = original(self, name)
            alive.append(weakref.ref(tensor))
            gc.collect()
            most = max(most, sum(t.nbytes for ref in alive if (t := ref()) is not None))
            return tensor

        return read

    monkeypatch.setattr(SafetensorsFolder, "read", watched(SafetensorsFolder.read))
    monkeypatch.setattr(ParameterReader, "read", watched(ParameterReader.read))
    convert_from_hf(tmp_path / "hf", tmp_path / "ours")
    convert_to_hf(tmp_path / "ours", tmp_path / "back")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert (
        len(alive) > 60 and most <= 3 * max(t.nbytes for t in tensors.values()) < sum(t.nbytes for t in tensors.values()) / 2
    )


def edited(folder: Path, name: str, tensors: Any = None, **config: Any) -> Path:
    save(name, folder)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | config))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True is not supported"),
        ("gpt2", {"activation_function": "mish"}, "activation_function: 'mish' is not supported"),
        ("gpt2", {"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not supported"),
        ("gpt2", {"n_embd": None}, "n_embd is missing"),
        ("gpt2", {"n_layer": -1}, "has a value that can't be: "),
        ("gpt2", {"activation_function": ["x"]}, "has a value that can't be: "),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": None}}, "has a value that can't be: "),
        ("t5", {"feed_forward_proj": None}, "has a value that can't be: "),
        ("gpt2", {"brand_new_feature": 7}, "brand_new_feature: 7 is a feature unknown here"),
        ("gpt2", {"n_positions": 32}, r"transformer.wpe.weight is \[64, 64\], expected \[32, 64\]"),
        ("llama", {"attention_bias": True}, "attention_bias True and mlp_bias False"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic' is not supported"),
        ("qwen2", {"model_type": "qwen3"}, "model_type 'qwen3' is not supported"),  # T07: norms per head
        ("llama", {"model_type": "olmo2"}, "model_type 'olmo2' is not supported"),  # T07: norms over all heads
        ("llama", {"use_qk_norm": True}, "use_qk_norm: True is a feature unknown here"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window: True"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "layer_types: sliding_attention"),
        ("bert", {"is_decoder": True}, "is_decoder: True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj: 'gated-mish'"),
    ],
)  # fmt: skip
def test_an_unsupported_feature_is_refused_by_its_name(name: str, change: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=words):
        convert_from_hf(edited(tmp_path / "hf", name, **change), tmp_path / "ours")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {n: x for n, x in t.items() if n != "transformer.h.1.ln_2.bias"}, "transformer.h.1.ln_2.bias is missing"),
        (lambda t: t | {"transformer.h.9.ln_1.bias": torch.zeros(3)}, "transformer.h.9.ln_1.bias is not part of this model"),
        (lambda t: t | {"transformer.ln_f.bias": torch.zeros(3)}, r"transformer.ln_f.bias is \[3\], expected \[64\]"),
        (
            lambda t: t | {"lm_head.weight": t["transformer.wte.weight"] + 1},
            "lm_head.weight and transformer.wte.weight differ",
        ),
    ],
)
def test_a_wrong_tensor_is_named_and_nothing_is_left_behind(change: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=words):
        convert_from_hf(edited(tmp_path / "hf", "gpt2", change), tmp_path / "ours")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_T06_T07_norms_of_queries_and_keys_are_refused_not_dropped(tmp_path: Path) -> None:
    """No such norm is built here, per head or over all heads; a model that was trained with one must not lose it."""

    def with_norms(tensors: Any) -> Any:
        return tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}

    with pytest.raises(ConvertError, match=r"model.layers.0.self_attn.q_norm.weight is not part of this model"):
        convert_from_hf(edited(tmp_path / "hf", "llama", with_norms), tmp_path / "ours")


def test_C14_either_name_of_a_tied_weight_and_old_files_are_taken(tmp_path: Path) -> None:
    def other_name(t: dict) -> dict:
        wte = t.pop("transformer.wte.weight")
        return t | {
            "lm_head.weight": wte,
            "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
            "transformer.h.0.attn.masked_bias": torch.ones(()),
        }

    def without_prefix(t: dict) -> dict:
        return {n.removeprefix("transformer."): x for n, x in t.items()}

    results = []
    for number, change in enumerate((None, other_name, without_prefix)):
        convert_from_hf(edited(tmp_path / f"hf{number}", "gpt2", change), tmp_path / f"ours{number}")
        results.append(load_file(tmp_path / f"ours{number}" / "shard-00001.safetensors"))
    assert all(torch.equal(results[0][n], r[n]) for r in results[1:] for n in results[0])


def test_a_broken_index_is_one_message_and_others_folders_stay(tmp_path: Path) -> None:
    folder = edited(tmp_path / "hf", "gpt2")
    (tmp_path / "ours.partial").mkdir()
    (tmp_path / "ours.partial" / "mine.txt").write_text("precious")
    convert_from_hf(folder, tmp_path / "ours")
    assert (tmp_path / "ours.partial" / "mine.txt").read_text() == "precious"
    for text in ("{", '{"weight_map": 3}'):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ConvertError, match="model.safetensors.index.json can't be read"):
            convert_from_hf(folder, tmp_path / "other")


def test_a_base_model_of_gpt2_is_taken_and_one_without_its_head_is_named(tmp_path: Path) -> None:
    import transformers

    save("gpt2", tmp_path / "hf")
    transformers.GPT2Model.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "base")
    convert_from_hf(tmp_path / "hf", tmp_path / "ours")
    convert_from_hf(tmp_path / "base", tmp_path / "same")
    a, b = (load_file(tmp_path / f / "shard-00001.safetensors") for f in ("ours", "same"))
    assert all(torch.equal(a[n], b[n]) for n in a)
    save("bert", tmp_path / "bert")
    transformers.BertModel.from_pretrained(tmp_path / "bert").save_pretrained(tmp_path / "headless")
    with pytest.raises(ConvertError, match="cls.predictions.transform.dense.weight is missing"):
        convert_from_hf(tmp_path / "headless", tmp_path / "no")


def test_a_pickle_is_never_opened_and_a_full_folder_never_written_over(tmp_path: Path) -> None:
    folder = edited(tmp_path / "hf", "gpt2")
    (tmp_path / "ours").mkdir()
    with pytest.raises(ConvertError, match="is there already"):
        convert_from_hf(folder, tmp_path / "ours")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConvertError, match="is a pickle"):
        convert_from_hf(folder, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "section", "change", "words"),
    [
        ("llama", "transformer", {"window_size": 8}, "transformer.window_size is 8, but HF's llama has None"),
        ("llama", "transformer", {"activation": "squared_relu"}, "transformer.activation is squared_relu"),
        ("llama", "model", {"rotary_interleaved": True}, "model.rotary_interleaved is True"),
        ("bert", "transformer", {"layernorm_position": "pre"}, "layernorm_position is pre, but HF's bert has post"),
        ("gpt2", "transformer", {"softmax_type": "off-by-one"}, "transformer.softmax_type is off-by-one"),
        ("t5", "transformer", {"attention_scale": None}, "transformer.attention_scale"),
    ],
)
def test_what_hf_has_no_counterpart_for_is_refused(
    name: str, section: str, change: dict, words: str, converted: Any, tmp_path: Path
) -> None:
    state = read_state(converted(name)[1])
    state["config"][section] |= change
    import shutil

    shutil.copytree(converted(name)[1], tmp_path / "ours")
    (tmp_path / "ours" / "state.json").write_text(json.dumps(state))
    marker = json.loads((tmp_path / "ours" / "complete.json").read_text())
    marker["files"]["state.json"] = (tmp_path / "ours" / "state.json").stat().st_size
    (tmp_path / "ours" / "complete.json").write_text(json.dumps(marker))
    with pytest.raises(ConvertError, match=words):
        convert_to_hf(tmp_path / "ours", tmp_path / "back")
    assert not list(tmp_path.glob("back*"))
