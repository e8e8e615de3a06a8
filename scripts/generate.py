"""Text from a trained run: a GPT continues a prompt, a T5 answers it, a BERT fills in its masks.

python scripts/generate.py runs/quickstart --prompt "def " [--temperature 0.8] [--top-k 40] [--top-p 0.95]
python scripts/generate.py runs/bert-quickstart --prompt "def __init__(self[MASK] name):"
python scripts/generate.py runs/t5-quickstart --prompt "for i in <extra_id_0>(10):" --temperature 0
"""

from __future__ import annotations

import argparse
import math
import sys

from trainer.errors import UserError


def main() -> int:
    """Parse, load, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's folder (its newest checkpoint), or a checkpoint's folder")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=40, help="sample from the k likeliest tokens; 0: from all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest that have this probability together"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="tokenizer.json or .model; data.tokenizer of the run when not given")
    arguments = parser.parse_args()
    if not 0 <= arguments.temperature < math.inf or arguments.top_k < 0 or arguments.max_new_tokens < 0:
        parser.error("--temperature, --top-k and --max-new-tokens must be 0 or more")
    if not 0 < arguments.top_p <= 1 or not 0 <= arguments.seed < 2**63:
        parser.error("--top-p must be above 0 and at most 1, --seed 0 or more and below 2^63")
    if any("\ud800" <= c <= "\udfff" for c in arguments.prompt):
        parser.error("--prompt is not UTF-8")
    try:
        print(_text(arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _text(arguments: argparse.Namespace) -> str:
    import torch

    from trainer.data.tokenizer import load_tokenizer
    from trainer.generate import Sampling, fill_masks, generate, load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, config, iteration = load_model(arguments.run, device)
    path = arguments.tokenizer or config.data.tokenizer
    if path is None:
        raise UserError("the run names no tokenizer (data.tokenizer); give one with --tokenizer")
    tokenizer = load_tokenizer(path)
    if config.model.family == "bert":
        text, found = fill_masks(model, tokenizer, arguments.prompt, config)
        rows = [", ".join(f"{token} {probability:.0%}" for token, probability in best) for best in found]
        return "\n".join([f"--- iteration {iteration}", text, *(f"mask {n}: {row}" for n, row in enumerate(rows, 1)), "---"])
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    limit, seed = arguments.max_new_tokens, arguments.seed
    text = generate(model, tokenizer, arguments.prompt, config, max_new_tokens=limit, sampling=sampling, seed=seed)
    how = f"iteration {iteration}, temperature {sampling.temperature}, top-k {sampling.top_k}, top-p {sampling.top_p}"
    return f"--- {how}\n{text}\n---"


if __name__ == "__main__":
    raise SystemExit(main())
