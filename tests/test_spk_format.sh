#!/usr/bin/env bash
# formats/spk-format.md is complete and true: a reader that was written from it alone (spk_reader.py) reads real packs,
# finds in them what spk-info finds, and gets the source's bytes back.
set -u
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
    echo "SKIP test_spk_format: python3 (3.8 or later) is not there"
    exit 0
fi
status=0
check() { if eval "$2"; then echo "ok $1"; else echo "FAIL $1: $2"; status=1; head -n 20 "$dir/out" | cut -c 1-200 | sed 's/^/  /'; fi; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
reader() { python3 tests/spk_reader.py "$@" >"$dir/out" 2>&1; }
# Is EXPRESSION true of a and b, two JSON files?  same() allows for spk-info's JSON, which has 15 digits of a number.
json() {
    python3 -c "
import json, math, sys
def same(x, y):
    if isinstance(x, float) or isinstance(y, float): return math.isclose(x, y, rel_tol=1e-14)
    if isinstance(x, dict): return x.keys() <= y.keys() and all(same(x[k], y[k]) for k in x)
    if isinstance(x, list): return len(x) == len(y) and all(map(same, x, y))
    return x == y
a, b = [json.load(open(path)) for path in sys.argv[1:]]
sys.exit(not ($1))" "$2" "$3"
}

for model in packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf tests/models/tiny-qwen3moe-q4_k_m.gguf tests/models/tiny-qwen35-q4_k_m.gguf; do
    "$SPK_BIN/spk-pack" --quiet --force --recipe native $model "$dir/a.spk" >"$dir/out" 2>&1
    reader "$dir/a.spk" --source $model
    check "metadata and weights of $(basename $model)" 'grep -qE "^([0-9]+) of \1 tensors equal" "$dir/out"'
done

model=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
"$SPK_BIN/spk-pack" --quiet --force --recipe native --set '.*ffn_down_exps.*=Q4_K' $model "$dir/a.spk" >"$dir/out" 2>&1
"$SPK_BIN/spk-info" --json --tensors "$dir/a.spk" >"$dir/info.json"
reader "$dir/a.spk"
cp "$dir/out" "$dir/page.json"
for part in file_bytes version_major version_minor root sections tensors; do
    check "$part as spk-info has it" "json 'same(a[\"$part\"], b[\"$part\"])' \"\$dir/page.json\" \"\$dir/info.json\""
done
check "provenance as spk-info has it" 'json "list(a[\"provenance\"].values()) == [b[\"provenance\"][k] for k in (\"source_name\", \"recipe_name\", \"recipe_text\", \"imatrix_name\", \"tool_version\", \"source_bytes\", \"source_xxh3_128\", \"source_gguf_version\", \"source_alignment_bytes\")]" "$dir/page.json" "$dir/info.json"'
reader "$dir/a.spk" --source $model
check "copied weights beside requantized ones" 'grep -q "^141 of 149 tensors equal" "$dir/out"'

if [ -e build/models/tiny-qwen36-bf16.gguf ]; then
    "$SPK_BIN/spk-pack" --quiet --force --recipe ffn --source-weights build/models/tiny-qwen36-bf16.gguf $model "$dir/w.spk" >"$dir/out" 2>&1
    "$SPK_BIN/spk-info" --json "$dir/w.spk" >"$dir/info.json"
    reader "$dir/w.spk"
    cp "$dir/out" "$dir/page.json"
    check "provenance of better weights as spk-info has it" 'json "[a[\"provenance\"][\"weights.\" + k] for k in (\"name\", \"bytes\", \"xxh3_128\")] == [b[\"provenance\"][\"weights_\" + k] for k in (\"name\", \"bytes\", \"xxh3_128\")]" "$dir/page.json" "$dir/info.json"'
    reader "$dir/w.spk" --source $model
    check "copied weights beside ones from another file" 'grep -q "^117 of 149 tensors equal" "$dir/out"'
fi

# The reader is no rubber stamp: it sees a swapped byte, and a cut file.
cp "$dir/a.spk" "$dir/bad.spk"
printf '\xff' | dd of="$dir/bad.spk" bs=1 seek=5010000 conv=notrunc status=none
check "a changed weight is seen" '! reader "$dir/bad.spk" --source $model && grep -q "differs" "$dir/out"'
head -c 5000000 "$dir/a.spk" >"$dir/bad.spk"
check "a cut file is refused by its rule" '! reader "$dir/bad.spk" && grep -q "^R5" "$dir/out"'

reader --example formats/spk-format.md
cat >"$dir/expected.json" <<'END'
{"header": [1, 0, 0, 0, 8, 57344],
 "tensor": {"name": "blk.0.ffn_gate_exps.weight", "type": "Q4_K", "source_type": "Q5_K", "dims": [256, 30, 2],
            "layout": "T32", "section": "EXPERTS", "unit_stride_bytes": 9216}}
END
check "the page's example says what the text around it says" 'json "same(a, b)" "$dir/expected.json" "$dir/out"'
exit $status
