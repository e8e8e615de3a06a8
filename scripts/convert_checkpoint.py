"""Between Hugging Face's format and checkpoints here: GPT-2, Llama, Qwen2, BERT, T5.

python scripts/convert_checkpoint.py from-hf HF_FOLDER --out CHECKPOINT
python scripts/convert_checkpoint.py to-hf RUN_OR_CHECKPOINT --out HF_FOLDER [--dtype bf16] [--tokenizer tokenizer.json]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from trainer.errors import UserError


def main() -> int:
    """Parse, convert, say what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    from_hf = ways.add_parser("from-hf", help="config.json, safetensors and tokenizer -> a checkpoint")
    to_hf = ways.add_parser("to-hf", help="a checkpoint -> a folder for AutoModel.from_pretrained")
    for way, source in (
        (from_hf, "the HF model's folder"),
        (to_hf, "a run's folder (its newest checkpoint) or a checkpoint's"),
    ):
        way.add_argument("source", help=source)
        way.add_argument("--out", required=True, help="folder to write; must not be there yet")
    to_hf.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights; as they came, else fp32")
    to_hf.add_argument("--max-shard-gib", type=float, default=5.0, help="size at which another file is begun (5)")
    to_hf.add_argument("--tokenizer", help="tokenizer.json or .model to put beside; that of the checkpoint when not given")
    arguments = parser.parse_args()
    from trainer.convert.from_hf import convert_from_hf
    from trainer.convert.to_hf import convert_to_hf

    try:
        if arguments.way == "from-hf":
            config = convert_from_hf(arguments.source, arguments.out)
            print(
                f"{arguments.out}: {config.model.family}; train from it with scripts/pretrain.py {arguments.out}/config.yaml"
            )
        else:
            if not 0 < arguments.max_shard_gib < math.inf:
                parser.error(f"--max-shard-gib {arguments.max_shard_gib}; expected a number above 0")
            shard = int(arguments.max_shard_gib * 2**30)
            written = convert_to_hf(arguments.source, arguments.out, arguments.dtype, shard, arguments.tokenizer)
            print(f"{arguments.out}: {written['architectures'][0]}, {written['dtype']}")
        if not any(Path(arguments.out, name).is_file() for name in ("tokenizer.json", "spiece.model", "tokenizer.model")):
            print(
                "note: no tokenizer was found to go with it"
                + (", give one with --tokenizer" if arguments.way == "to-hf" else "")
            )
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
