#!/usr/bin/env bash
# tests/accuracy.sh BIN_DIR - the rows of the accuracy tables in README.md, measured anew: some five minutes, and python3.
set -euo pipefail
bin=$1
source=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
original=build/models/tiny-qwen36-bf16.gguf
out=build/accuracy
mkdir -p "$out"
[ -f "$original" ] || { mkdir -p build/models && zstd -q -d -o "$original" tests/models/tiny-qwen36-bf16.gguf.zst; }

for recipe in native ffn safe fast; do
    "$bin/spk-pack" --quiet --force --recipe $recipe "$source" "$out/$recipe.spk" >/dev/null
done
"$bin/spk-pack" --quiet --force --imatrix tests/models/tiny-qwen36.imatrix.gguf "$source" "$out/ffn-imatrix.spk" >/dev/null
"$bin/spk-pack" --quiet --force --source-weights "$original" "$source" "$out/ffn-source-weights.spk" >/dev/null
for base in "$source" "$original"; do
    "$bin/spk-compare" --text tests/text/held-out.txt --force --json "$out/report.json" "$base" \
        "$out"/{native,ffn,ffn-imatrix,ffn-source-weights,safe,fast}.spk >/dev/null
    python3 - "$out/report.json" <<'PY'
import json
import os
import sys

report = json.load(open(sys.argv[1]))
print(f"\nbase {report['base']['path']}, {report['base']['backend']}, {report['candidates'][0]['positions']} positions\n")
print("| pack | read per token | mean KL | 99 % KL | same top-1 | ln PPL ratio |")
print("| --- | ---: | ---: | ---: | ---: | ---: |")
for c in report["candidates"]:
    print(f"| {os.path.basename(c['path'])[:-4]} | {c['bytes_per_token'] / 1e6:.2f} MB | "
          f"{c['kl_mean']:.5f} ± {c['kl_se']:.5f} | {c['kl_p99']:.3f} | "
          f"{100 * c['top1']:.2f} ± {100 * c['top1_se']:.2f} % | {c['ln_ppl_ratio']:+.4f} ± {c['ln_ppl_ratio_se']:.4f} |")
PY
done
