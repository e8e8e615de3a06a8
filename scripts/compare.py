"""Which arm is faster, and is it sure?

python scripts/compare.py CONFIG [overrides] --fused-vs-unfused
python scripts/compare.py CONFIG [overrides] --arm NAME [overrides] --arm NAME [overrides]
python scripts/compare.py CONFIG [overrides] --ablate [--flags FLAG,FLAG]
python scripts/compare.py CONFIG [overrides] --backends masked_softmax_fusion=compile,triton,reference
python scripts/compare.py --arms FILE.yaml
python scripts/compare.py --runs runs/a runs/b

Arms are lists of overrides on one configuration and take turns, so that the machine's drift hits all alike. Each is compared with
the first one. The report: DIR/report.html, report.json (the verdict can be recomputed from it), report.png. Exit code 0, 2 for a
mistake in the command, 1 where an arm died (the others are reported).
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from pathlib import Path
from typing import Any

from configs.load import load_config
from configs.section import ConfigError, Problem
from fusions.machine import probe
from trainer.compare.arms import Arm, Arms, ablation, against_first, backends, fused_vs_unfused, read_arms
from trainer.compare.conductor import Conductor
from trainer.compare.outputs import write_outputs
from trainer.compare.plan import ComparisonPlan
from trainer.compare.report import make_report
from trainer.compare.runs import compare_runs
from trainer.compare.turns import Budget, Pair
from trainer.log import Log

_DEFAULT_ROUNDS = 16  # 20 rounds of an ablation of seven flags, 16 arms, took 18.5 minutes on two cores


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="YAML of the job; an arms file may name it instead")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all arms")
    which = parser.add_argument_group("arms (one of these; --arm also adds to the others)")
    which.add_argument("--arm", nargs="+", action="append", default=[], metavar=("NAME", "OVERRIDE"))
    which.add_argument(
        "--fused-vs-unfused", action="store_true", help="the configuration's fusions against none, eager and compiled"
    )
    which.add_argument("--one-at-a-time", action="store_true", help="each fusion by itself against none")
    which.add_argument("--leave-one-out", action="store_true", help="all fusions but one against all")
    which.add_argument("--ablate", action="store_true", help="both, and whether the single effects add up")
    which.add_argument("--backends", metavar="FLAG=a,b,reference", help="one arm for each backend of a flag")
    which.add_argument("--arms", metavar="FILE", help="arms kept in a YAML file")
    which.add_argument("--runs", nargs=2, metavar=("A", "B"), help="two finished runs side by side; nothing is run")
    parser.add_argument("--flags", default="", help="only these flags, comma-separated (with the fusion shorthands)")
    parser.add_argument("--nproc", type=int, help="processes of every arm; what its configuration needs when not given")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--rounds", type=int, help=f"turns of each arm ({_DEFAULT_ROUNDS})")
    how.add_argument("--until-resolved", type=_fraction, metavar="1%%", help="go on until every interval is within ± this")
    parser.add_argument("--time-limit", type=float, help="seconds of --until-resolved (600)")
    parser.add_argument("--steps", type=int, help="optimizer steps of one turn; as few as fill 50 ms when not given")
    parser.add_argument("--loss-iters", type=int, help="iterations over which losses are compared (20)")
    parser.add_argument("--no-attribution", action="store_true", help="leave out profiles and roofline")
    parser.add_argument("--out", default="", help="folder of the report; runs/<name>/compare when not given")
    return parser.parse_args()


def _fraction(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a percentage, such as 1%")
    return value


def make_plan(arguments: argparse.Namespace) -> ComparisonPlan:
    """The arms the command asks for. Raises ConfigError."""
    options: dict[str, Any] = {}
    config_path, overrides = arguments.config, list(arguments.overrides)
    if arguments.arms:
        file = read_arms(arguments.arms)
        if config_path is not None and "=" in config_path:  # without a CONFIG, the first override stands in its place
            overrides, config_path = [config_path, *overrides], None
        config_path, overrides, options = config_path or file.config, [*file.overrides, *overrides], file.options
    if config_path is None:
        raise ConfigError([Problem("CONFIG", "is missing; name the YAML of the job")])
    config = load_config(config_path, overrides).config
    shorthand = _shorthand(arguments, config)
    arms = file.arms if arguments.arms else shorthand
    extra = [Arm(name, tuple(own)) for name, *own in arguments.arm]
    if arms is None:
        arms = against_first(extra)
    else:
        pairs = [*arms.pairs, *(Pair(arm.name, arms.arms[0].name) for arm in extra)]
        arms = dataclasses.replace(arms, arms=[*arms.arms, *extra], pairs=pairs)
    if arguments.nproc is not None:
        arms = dataclasses.replace(
            arms, arms=[dataclasses.replace(a, processes=a.processes or arguments.nproc) for a in arms.arms]
        )
    return ComparisonPlan(
        config_path,
        overrides,
        arms.arms,
        arms.pairs,
        _budget(arguments, options),
        arguments.out or f"{config.run.path}/compare",
        steps_per_block=_given(arguments.steps, options.get("steps"), None),
        loss_iters=_given(arguments.loss_iters, options.get("loss_iters"), 20),
        attribution=not arguments.no_attribution,
        left_out=arms.left_out,
        ablation=arms.ablation,
    )


def _shorthand(arguments: argparse.Namespace, config: Any) -> Arms | None:
    flags = [flag for flag in arguments.flags.split(",") if flag]
    asked = [
        arguments.fused_vs_unfused,
        bool(arguments.backends),
        arguments.one_at_a_time or arguments.leave_one_out or arguments.ablate,
    ]
    if sum(asked) > 1 or (arguments.ablate and (arguments.one_at_a_time or arguments.leave_one_out)):
        raise ConfigError([Problem("arms", "more than one shorthand was given; choose one")])
    if flags and not asked[2]:
        raise ConfigError(
            [Problem("--flags", "narrows --ablate, --one-at-a-time or --leave-one-out; none of them was given")]
        )
    if sum(asked) and arguments.arms:
        raise ConfigError([Problem("--arms", "the file has the arms; a shorthand beside it has no meaning")])
    if arguments.fused_vs_unfused:
        return fused_vs_unfused(config)
    if arguments.backends:
        flag, _, names = arguments.backends.partition("=")
        return backends(flag, [name for name in names.split(",") if name])
    if asked[2]:
        single, out = arguments.ablate or arguments.one_at_a_time, arguments.ablate or arguments.leave_one_out
        return ablation(config, probe(config.run.device), flags, single, out)
    return None


def _given(command: Any, file: Any, default: Any) -> Any:
    """The command's value, or else the arms file's."""
    return command if command is not None else file if file is not None else default


def _budget(arguments: argparse.Namespace, options: dict[str, Any]) -> Budget:
    rounds, until = arguments.rounds, arguments.until_resolved
    if rounds is None and until is None:
        rounds, until = options.get("rounds"), options.get("until_resolved")
        try:
            until = until if until is None else _fraction(str(until))
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError([Problem("until_resolved", str(error))]) from None
    if until is not None:
        return Budget(None, until, _given(arguments.time_limit, options.get("time_limit"), 600.0))
    return Budget(_DEFAULT_ROUNDS if rounds is None else rounds)


def main() -> int:
    """Check everything, measure, report."""
    arguments, log = parse(), Log(rank=0)
    try:
        if arguments.runs and (arguments.config or arguments.arm or arguments.arms):
            raise ConfigError([Problem("--runs", "joins two finished runs and runs nothing; give no CONFIG and no arms")])
        if arguments.runs:
            first, second = arguments.runs
            return compare_runs(first, second, arguments.out, log)
        plan = make_plan(arguments)
        loaded = plan.check()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for flag, why in plan.left_out.items():
        log.line(f"{flag} is left out: {why}")
    Path(plan.out).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # stopped groups must not stay behind
    measured = Conductor(plan, loaded, log).run()
    report = make_report(plan, measured, sys.argv)
    write_outputs(report, plan.out, loaded[plan.arms[0].name].config, log)
    return 1 if measured.dead else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
