"""Pretrain a model:  torchrun --nproc-per-node N scripts/pretrain.py CONFIG [section.key=value ...]"""

from __future__ import annotations

import argparse

from trainer.launch import load_for_job, run_job


def main() -> int:
    """Parse, load, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="a YAML file, e.g. configs/gpt/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    loaded = load_for_job(arguments.config, arguments.overrides)

    def job() -> None:
        from trainer.log import Log
        from trainer.loop import train
        from trainer.setup import build_job, start

        log = Log()
        train(build_job(loaded, *start(loaded, log), log))

    return run_job(job)


if __name__ == "__main__":
    raise SystemExit(main())
