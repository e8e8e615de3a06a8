#!/usr/bin/env bash
# From a fresh clone to a trained model and a fused/unfused verdict. Safe to run again: it reuses what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_env

config=configs/gpt/quickstart.yaml
if [ ! -s corpus/tokenizer.json ] || [ ! -s corpus/train.idx ] || [ ! -s corpus/valid.idx ]; then
    echo "== corpus"
    python scripts/build_corpus.py --out corpus
    python scripts/train_tokenizer.py --input corpus/train.jsonl --vocab-size 512 --output corpus/tokenizer.json
    for split in train valid; do
        python scripts/preprocess_data.py --input corpus/$split.jsonl --tokenizer corpus/tokenizer.json --output-prefix corpus/$split
    done
fi

echo "== machine"
python scripts/doctor.py
processes=$(python scripts/doctor.py --processes)
overrides=("training.precision=$(python scripts/doctor.py --precision)")
if [ "$processes" = 1 ]; then
    overrides+=(parallel.tensor_parallel_size=1 parallel.sequence_parallel=false)
fi

echo "== training: torchrun --nproc-per-node $processes scripts/pretrain.py $config ${overrides[*]}"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" torchrun --standalone --nproc-per-node "$processes" scripts/pretrain.py "$config" "${overrides[@]}"

echo "== generated text"
python scripts/generate.py runs/quickstart --prompt "def " --max-new-tokens 120
python scripts/generate.py runs/quickstart --prompt "The " --max-new-tokens 60

echo "== fused against unfused"
python scripts/compare.py "$config" "${overrides[@]}" --fused-vs-unfused --rounds 12
echo
echo "run: runs/quickstart (config.yaml, fusions.json, metrics.jsonl, loss.png, checkpoints/)"
echo "verdict: runs/quickstart/compare/report.html (open it in a browser)"
echo "next: edit the fusion flags in $config and see what each does: python scripts/explain.py $config"
