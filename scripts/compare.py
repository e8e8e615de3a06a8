"""Which arm is faster, and is it sure?

python scripts/compare.py CONFIG [overrides] --arm NAME [overrides] --arm NAME [overrides] [--rounds R] [--out DIR]

Arms are lists of overrides on one configuration; the first is what the others are compared with. They run in one group of
processes (started with torchrun) and take turns, so that the machine's drift hits all alike.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from configs.load import load_config
from configs.section import ConfigError
from trainer.compare.plan import Arm, ComparisonPlan


def main() -> int:
    """Parse, check every arm, start the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all arms")
    parser.add_argument("--arm", nargs="+", action="append", required=True, metavar=("NAME", "OVERRIDE"))
    parser.add_argument("--nproc", type=int, help="processes; parallel.tensor_parallel_size when not given")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each arm")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of one turn")
    parser.add_argument("--out", default="", help="folder of the report; runs/<name>/compare when not given")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, arguments.overrides).config
        nproc = config.parallel.tensor_parallel_size if arguments.nproc is None else arguments.nproc
        plan = ComparisonPlan(
            arguments.config,
            arguments.overrides,
            [Arm(name, overrides) for name, *overrides in arguments.arm],
            rounds=arguments.rounds,
            steps_per_block=arguments.steps,
            out=arguments.out or f"{config.run.path}/compare",
        )
        plan.check(nproc)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        plan.write(path)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        return subprocess.run([*launcher, "-m", "trainer.compare.worker", str(path)], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
