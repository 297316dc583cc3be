#!/usr/bin/env bash
# tests/peer/kl.sh BIN_DIR - our ffn recipe against llama.cpp's quantizer on the same tensors, paired by position.
# Part of run.sh, which has fetched and compiled what this needs; run from the root of the tree.
set -u
bin=${1:?usage: tests/peer/kl.sh BIN_DIR}
. tests/peer/common.sh
source=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf

make_both() {
    "$peer/peer" "$libs" requant "$source" "$peer/theirs-ffn.gguf" Q4_K ffn_gate_shexp ffn_up_shexp ffn_down_shexp \
        ffn_down_exps &&
    "$bin/spk-pack" --quiet --force --recipe ffn "$source" "$peer/ours-ffn.spk" >/dev/null
}
compare() {
    "$bin/spk-compare" --text tests/text/held-out.txt --max-tokens 8448 --json "$peer/kl.json" "$source" \
        "$peer/ours-ffn.spk" "$peer/theirs-ffn.gguf" >/dev/null
}
make_both && compare || { echo "FAIL requantizing and comparing $source"; exit 1; }
python3 - "$peer/kl.json" <<'PY'
import json
import sys

ours, theirs = json.load(open(sys.argv[1]))["candidates"]
difference, error = -theirs["kl_diff_to_first"], theirs["kl_diff_se"]
good = ours["positions"] >= 8000 and difference <= 0
print(f"{'ok' if good else 'FAIL'} ffn recipe is no further from the source than llama.cpp's quantizer: mean KL "
      f"{ours['kl_mean']:.6f} and {theirs['kl_mean']:.6f}, difference {difference:+.6f} +- {error:.6f} "
      f"over {ours['positions']} positions")
sys.exit(not good)
PY
