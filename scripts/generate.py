"""Text from a trained run.  python scripts/generate.py runs/quickstart --prompt "def " [--temperature 0.8] [--top-k 40]"""

from __future__ import annotations

import argparse
import sys

from trainer.errors import UserError


def main() -> int:
    """Parse, load, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run's folder (its newest checkpoint), or a checkpoint's folder")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=40, help="sample from the k likeliest tokens; 0: from all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="tokenizer.json; data.tokenizer of the run when not given")
    arguments = parser.parse_args()
    if arguments.temperature < 0 or arguments.top_k < 0 or arguments.max_new_tokens < 0:
        parser.error("--temperature, --top-k and --max-new-tokens must be 0 or more")
    import torch

    from trainer.data.tokenizer import load_tokenizer
    from trainer.generate import generate, load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model, config, iteration = load_model(arguments.run, device)
        path = arguments.tokenizer or config.data.tokenizer
        if path is None:
            raise UserError("the run names no tokenizer (data.tokenizer); give one with --tokenizer")
        tokenizer = load_tokenizer(path)
        text = generate(
            model,
            tokenizer,
            arguments.prompt,
            config,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            seed=arguments.seed,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"--- iteration {iteration}, temperature {arguments.temperature}, top-k {arguments.top_k}\n{text}\n---")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
