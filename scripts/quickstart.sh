#!/usr/bin/env bash
# From a fresh clone to a trained model and a fused/unfused verdict. Safe to run again: it reuses what is there.
#   bash scripts/quickstart.sh [gpt|bert|t5]
set -euo pipefail
cd "$(dirname "$0")/.."
family="${1:-gpt}"
case "$family" in
    gpt) folder=corpus name=quickstart tokenizer=(--vocab-size 512) split=() ;;
    bert) folder=corpus/bert name=bert-quickstart tokenizer=(--vocab-size 512 --algorithm bpe) split=(--split-sentences) ;;
    t5) folder=corpus/t5 name=t5-quickstart tokenizer=(--vocab-size 1024 --algorithm bpe) split=() ;;
    *) echo "quickstart.sh: $family is not a family; expected gpt, bert or t5" >&2; exit 2 ;;
esac
source scripts/setup_env.sh
setup_env

config=configs/$family/quickstart.yaml
if [ ! -s corpus/train.jsonl ] || [ ! -s corpus/valid.jsonl ]; then
    echo "== corpus"
    python scripts/build_corpus.py --out corpus
fi
if [ ! -s $folder/tokenizer.json ] || [ ! -s $folder/train.idx ] || [ ! -s $folder/valid.idx ]; then
    echo "== tokenizer and data"
    python scripts/train_tokenizer.py --input corpus/train.jsonl --family "$family" "${tokenizer[@]}" --output $folder/tokenizer.json
    for part in train valid; do
        python scripts/preprocess_data.py --input corpus/$part.jsonl --tokenizer $folder/tokenizer.json --output-prefix $folder/$part \
            ${split[@]+"${split[@]}"}
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
case "$family" in
    gpt)
        python scripts/generate.py runs/$name --prompt "def " --max-new-tokens 120
        python scripts/generate.py runs/$name --prompt "The " --max-new-tokens 60
        ;;
    bert) python scripts/generate.py runs/$name --prompt "def __init__(self[MASK] name):" ;;
    t5) python scripts/generate.py runs/$name --prompt "for i in <extra_id_0>(10): return<extra_id_1>" --temperature 0 --max-new-tokens 20 ;;
esac

echo "== fused against unfused"
python scripts/compare.py "$config" "${overrides[@]}" --fused-vs-unfused --rounds 12
echo
echo "run: runs/$name (config.yaml, fusions.json, metrics.jsonl, loss.png, checkpoints/)"
echo "verdict: runs/$name/compare/report.html (open it in a browser)"
echo "next: edit the fusion flags in $config and see what each does: python scripts/explain.py $config"
