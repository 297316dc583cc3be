#!/usr/bin/env bash
# tests/peer/kl.sh BIN_DIR - recipes ffn and fast against llama.cpp's quantizer on the same tensors, paired by position:
# without calibration, and calibrated on another text than the one that is scored.
# Part of run.sh, which has fetched and compiled what this needs; run from the root of the tree.
set -u
bin=${1:?usage: tests/peer/kl.sh BIN_DIR}
. tests/peer/common.sh
source=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
ffn="ffn_gate_shexp ffn_up_shexp ffn_down_shexp ffn_down_exps"
fast="$ffn attn_q.weight attn_output attn_qkv attn_gate ssm_out output.weight"

make_all() {
    local recipe
    "$bin/spk-calibrate" --force --text tests/text/calibration.txt -o "$peer/stats.gguf" "$source" >/dev/null || return
    for recipe in ffn fast; do
        # shellcheck disable=SC2086
        "$peer/peer" "$libs" requant "$source" "$peer/theirs-$recipe.gguf" Q4_K ${!recipe} &&
        "$bin/spk-pack" --quiet --force --recipe $recipe "$source" "$peer/plain-$recipe.spk" >/dev/null &&
        "$bin/spk-pack" --quiet --force --recipe $recipe --calibration "$peer/stats.gguf" "$source" \
            "$peer/calibrated-$recipe.spk" >/dev/null || return
    done
}
compare() {
    "$bin/spk-compare" --text tests/text/held-out.txt --force --json "$peer/kl-$1.json" "$source" "$peer/theirs-$1.gguf" \
        "$peer/plain-$1.spk" "$peer/calibrated-$1.spk" >/dev/null
}
make_all && compare ffn && compare fast || { echo "FAIL requantizing and comparing $source"; exit 1; }
python3 - "$peer" <<'PY'
import json
import sys

status = 0
for recipe in ("ffn", "fast"):
    theirs, *ours = json.load(open(f"{sys.argv[1]}/kl-{recipe}.json"))["candidates"]
    for name, limit, pack in zip(("without calibration", "calibrated"), (0.98, 0.94), ours):
        ratio, error = pack["kl_mean"] / theirs["kl_mean"], pack["kl_diff_se"] / theirs["kl_mean"]
        good = pack["positions"] >= 16000 and ratio <= limit and ratio + error < 1
        status |= not good
        print(f"{'ok' if good else 'FAIL'} {recipe} {name}: mean KL {pack['kl_mean']:.6f}, llama.cpp's quantizer "
              f"{theirs['kl_mean']:.6f}: {ratio:.3f} +- {error:.3f} of it, at most {limit}, over {pack['positions']} positions")
sys.exit(status)
PY
