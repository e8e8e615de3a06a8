"""The arms of a comparison, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config
from configs.section import ConfigError
from fusions.machine import probe
from tests.conftest import ROOT
from trainer.compare.arms import Arm, ablation, against_first, backends, fused_vs_unfused, read_arms
from trainer.compare.conductor import largest_that_fits
from trainer.compare.plan import ComparisonPlan, groups, other_losses, refusals
from trainer.compare.turns import Budget, Pair


def plan(tiny: Path, *arms: Arm, rounds: int = 20, pairs: list[Pair] | None = None) -> ComparisonPlan:
    made = against_first(list(arms))
    return ComparisonPlan(
        str(tiny / "tiny.yaml"),
        ["run.device=cpu"],
        list(arms),
        made.pairs if pairs is None else pairs,
        Budget(rounds),
        str(tiny / "out"),
    )


def test_what_cannot_be_compared_is_named(tiny: Path) -> None:
    plan(tiny, Arm("a"), Arm("b", ("transformer.hidden_size=128",))).check()
    for arms, words in (
        ([Arm("a"), Arm("b", ("transformer.hiden=1",))], "arm b: transformer.hiden"),
        ([Arm("a"), Arm("transformer.persist_layer_norm=true")], "an arm starts with its name"),
        ([Arm("a")], "two or more"),
        ([Arm("a"), Arm("a")], "two or more different names"),
        ([Arm("a"), Arm("b", processes=3)], "arm b: training.global_batch_size: 4 is not .* data-parallel size 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan(tiny, *arms).check()
    with pytest.raises(ConfigError, match="needs 8 or more"):
        plan(tiny, Arm("a"), Arm("b"), rounds=7).check()
    with pytest.raises(ConfigError, match="against 'c'"):
        plan(tiny, Arm("a"), Arm("b"), pairs=[Pair("b", "c")]).check()


def test_arms_share_processes_only_where_they_are_started_alike(tiny: Path) -> None:
    arms = [
        Arm("a"),
        Arm("b", ("transformer.hidden_size=128",)),
        Arm("c", environment=(("X", "1"),)),
        Arm("d", ("run.threads=1",)),
        Arm("e", ("parallel.tensor_parallel_size=2",)),
    ]
    made = plan(tiny, *arms)
    assert [[arm.name for arm in group] for group in groups(made, made.check())] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_plan_survives_its_way_to_the_workers(tiny: Path) -> None:
    config = load_config(tiny / "tiny.yaml", ["run.device=cpu"]).config
    made = ablation(config, probe("cpu"), [], True, True)
    before = ComparisonPlan(
        str(tiny / "tiny.yaml"), [], made.arms, made.pairs, Budget(until_resolved=0.01), "o", ablation=made.ablation
    )
    before.write(tiny / "plan.json")
    assert ComparisonPlan.read(str(tiny / "plan.json")) == before


def test_fused_has_the_flags_of_the_configuration_or_all(tiny: Path) -> None:
    def fused(*overrides: str) -> list[str]:
        arms = fused_vs_unfused(load_config(tiny / "tiny.yaml", list(overrides)).config)
        assert [p.against for p in arms.pairs] == ["unfused", "unfused, compiled layers"]
        off = arms.arms[0].overrides
        return [o for o in arms.arms[1].overrides if o not in off]

    some = fused("transformer.bias_dropout_fusion=auto", "transformer.masked_softmax_fusion=compile")
    assert some == ["transformer.bias_dropout_fusion=auto", "transformer.masked_softmax_fusion=compile"]
    assert len(fused()) == 9 and all(o.endswith("=true") for o in fused())


def test_ablation_leaves_out_what_changes_nothing_and_says_why(tiny: Path) -> None:
    config = load_config(tiny / "tiny.yaml", ["run.device=cpu"]).config
    made = ablation(config, probe("cpu"), [], True, True)
    assert made.ablation is not None and "bias_dropout_fusion" in made.ablation.single
    assert "position_embedding_type" in made.left_out["apply_rope_fusion"]
    assert "one pass already" in made.left_out["persist_layer_norm"]
    names = [arm.name for arm in made.arms]
    assert names[:2] == ["none", "all"] and set(made.ablation.without.values()) <= set(names)
    assert made.pairs[0] == Pair("all", "none") and Pair("without bias_activation_fusion", "all") in made.pairs
    none, everything = (dict(o.split("=") for o in arm.overrides) for arm in made.arms[:2])
    assert set(none.values()) == {"false"} and "false" not in everything.values() and set(none) == set(everything)
    narrow = ablation(config, probe("cpu"), ["bias_dropout_fusion", "optimizer.fusion"], True, False)
    assert [arm.name for arm in narrow.arms] == ["none", "all", "bias_dropout_fusion", "optimizer.fusion"]
    with pytest.raises(ConfigError, match="not a fusion flag"):
        ablation(config, probe("cpu"), ["bias_droput_fusion"], True, True)
    with pytest.raises(ConfigError, match="no fusion flag can change"):
        ablation(config, probe("cpu"), ["apply_rope_fusion"], True, True)


def test_backends_of_a_flag_against_its_reference(tiny: Path) -> None:
    made = backends("masked_softmax_fusion", ["compile", "triton", "reference"])
    assert [(a.name, a.overrides) for a in made.arms] == [
        ("reference", ("transformer.masked_softmax_fusion=false",)),
        ("compile", ("transformer.masked_softmax_fusion=compile",)),
        ("triton", ("transformer.masked_softmax_fusion=triton",)),
    ]
    assert made.pairs == [Pair("compile", "reference"), Pair("triton", "reference")]
    with pytest.raises(ConfigError, match="is not a fusion flag"):
        backends("softmax", ["compile"])


def test_a_backend_that_cannot_run_here_is_dead_before_it_starts(tiny: Path) -> None:
    made = plan(tiny, Arm("a"), Arm("b", ("transformer.bias_dropout_fusion=apex",)))
    assert "apex" in refusals(made, made.check())["b"]


def test_arms_in_a_file(tiny: Path) -> None:
    file = tiny / "arms.yaml"
    file.write_text(
        f"config: {tiny}/tiny.yaml\noverrides: [run.device=cpu]\nuntil_resolved: 1%\n"
        "arms:\n  one: []\n  two: {overrides: [parallel.tensor_parallel_size=2], environment: {X: 1}, against: one}\n  three: [run.threads=1]\n"
    )
    read = read_arms(str(file))
    assert read.config == f"{tiny}/tiny.yaml" and read.options == {"until_resolved": "1%"}
    assert [(a.name, a.environment) for a in read.arms.arms] == [("one", ()), ("two", (("X", "1"),)), ("three", ())]
    assert read.arms.pairs == [Pair("two", "one"), Pair("three", "one")]
    for text, words in (
        ("arms: {a: [], b: {overides: []}}", "overides is not a known key"),
        ("arms: {a: [], b: 3}", "expected a list of overrides"),
        ("arms: {a: [], b: [1]}", "expected a list of section.key=value"),
        ("arms: {a: []}\nround: 3", "round: is not a known key"),
        ("arm: {a: []}", "expected a mapping of"),
        ("arms: [", "is not valid YAML"),
        ("arms: {a: [], b: [], a: []}", "is there twice"),
        ("arms: {a: [], b: []}\nrounds: many", "expected a whole number"),
        ("arms: {a: [], b: []}\noverrides: 5", "expected a list of section.key=value"),
        ("arms: {a: [], b: []}\nrounds: 20\nuntil_resolved: 1%", "remove one"),
        ("arms: {a: [], b: {processes: 0}}", "processes: got 0"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_arms(str(file))


@pytest.mark.parametrize("path", sorted((ROOT / "configs/compare").glob("*.yaml")), ids=lambda p: p.name)
def test_the_comparisons_kept_here_are_sound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    read = read_arms(str(path))
    assert read.config is not None
    ComparisonPlan(read.config, read.overrides, read.arms.arms, read.arms.pairs, Budget(20), "out").check()


def test_losses_are_compared_only_between_arms_that_train_alike(tiny: Path) -> None:
    def dump(*overrides: str) -> dict:
        return load_config(tiny / "tiny.yaml", list(overrides)).config.model_dump()

    base = dump()
    for same in (
        "transformer.bias_dropout_fusion=true",
        "training.micro_batch_size=1",
        "training.compile_layers=true",
        "run.name=b",
    ):
        assert other_losses(base, dump(same)) == []
    assert other_losses(base, dump("optimizer.learning_rate=2e-3", "training.seed=1")) == [
        "optimizer.learning_rate",
        "training.seed",
    ]


@pytest.mark.parametrize("most", [4, 5, 7, 8, 100, 1000])
def test_the_largest_batch_that_fits_is_found_in_few_tries(most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    found = largest_that_fits(fits, 4)
    assert found <= most <= found * 17 / 16 + 1 and len(tried) <= 16 and max(tried) < 2.1 * max(most, 8)
