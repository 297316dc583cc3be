#!/usr/bin/env bash
# What every tool prints of names that strangers chose: no control character, nothing that turns a line around, nothing that
# cannot be seen, only UTF-8.  The name in question is that of a directory, a source (so of its pack's provenance), a recipe and a tensor.
set -u
. tests/cases.sh
python3 -c '' || { echo "SKIP test_plain.sh: no python3"; exit 0; }

model=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
# ESC ] 0 ; BEL would set a window's title; U+009B is ESC [; then an override, an isolate, a mark of direction, separators of lines,
# characters of no width, a tag, and bytes that are no UTF-8.
evil=$(printf 'e\033]0;t\007\302\2331m\302\205\342\200\256\342\201\246\342\200\217\342\200\250\342\200\251\342\200\213\342\200\215\357\273\277\363\240\201\201\377\303v')

# plain: of all that was printed.
plain() {
    python3 - "$dir/out" "$dir/err" <<'PY' || fail "$1 printed what is not plain"
import sys, unicodedata
for path in sys.argv[1:]:
    text = open(path, "rb").read().decode()                 # strict
    bad = [c for c in text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs", "Co")]
    if bad: sys.exit("%s: U+%04X in %r" % (path, ord(bad[0]), text[:2000]))
PY
    grep -qF 'e\u{1b}]0;t\u{7}\u{9b}1m' "$dir/out" "$dir/err" || grep -qF 'e\u001b]0;t\u0007\u009b1m' "$dir/out" "$dir/err" ||
        fail "$1 does not show the name: $(cat "$dir/out" "$dir/err")"
}
# prints STATUS TOOL ARGUMENT...
prints() {
    local status=$1 tool=$2
    shift 2
    run "$status" "$SPK_BIN/$tool" "$@"
    plain "$tool $1"
}

names() {
    local d=$dir/$evil
    mkdir "$d" && cp $model "$d/$evil.gguf"
    local source=$d/$evil.gguf pack=$d/$evil.spk
    prints 0 spk-pack --recipe native "$source" "$pack"
    prints 1 spk-pack --recipe native "$source" "$pack"
    prints 1 spk-pack --recipe native "$source" --report "$pack" "$d/x.spk"
    prints 0 spk-pack --dry-run --recipe native --imatrix tests/models/tiny-qwen36.imatrix.gguf "$source"
    prints 0 spk-pack --recipe native --json --force "$source" "$pack"
    prints 1 spk-pack --recipe "$d/none" "$source" "$d/x.spk"
    prints 1 spk-pack --recipe native --imatrix "$source" "$source" "$d/x.spk"
    prints 1 spk-pack --calibration "$source" "$source" "$d/x.spk"
    prints 2 spk-pack --threads "$evil" "$source" "$d/x.spk"
    prints 2 spk-pack --effort "$evil" "$source" "$d/x.spk"
    prints 2 spk-pack "--$evil" "$source" "$d/x.spk"
    prints 2 spk-pack --set "$evil" "$source" "$d/x.spk"
    prints 0 spk-info "$pack"
    prints 0 spk-info --json "$pack"
    prints 0 spk-info --tensors "$source"
    prints 1 spk-info "$d/none"
    prints 1 spk-info --repair $model "$d/none"
    prints 0 spk-unpack "$pack" "$d/x.gguf"
    prints 1 spk-unpack "$pack" "$d/x.gguf"
    prints 0 spk-run --backend ref --json --prompt a -n 1 "$pack"
    prints 1 spk-run --backend ref --tokens "$d/none" -n 1 "$pack"
    prints 2 spk-run --backend "$evil" --prompt a "$pack"
    prints 0 spk-compare --max-tokens 40 --ctx 20 --max-kl 1 --text tests/text/held-out.txt "$source" "$pack"
    prints 1 spk-compare --max-tokens 40 --text "$d/none" "$source" "$pack"
    prints 0 spk-bench --contexts 1 --tokens 1 --prompt 1 --repeats 1 "$pack"
    prints 1 spk-bench "$d/none"
    prints 0 spk-calibrate --max-tokens 40 --text tests/text/held-out.txt -o "$d/s" "$source"
    prints 1 spk-calibrate --max-tokens 40 --text tests/text/held-out.txt -o "$d/s" "$source"
}

# A pack from elsewhere, opened by a harmless name: what it says of itself is the stranger's.
provenance() {
    cp $model "$dir/$evil.gguf"
    run 0 "$SPK_BIN/spk-pack" --quiet --recipe native "$dir/$evil.gguf" "$dir/a.spk"
    prints 0 spk-info "$dir/a.spk"
    prints 0 spk-info --json "$dir/a.spk"
    prints 1 spk-info --repair tests/models/tiny-qwen35-q4_k_m.gguf "$dir/a.spk"
}

# Names of tensors may have any bytes above 0x7f.
tensors() {
    LC_ALL=C sed "s/blk\\.0\\.attn_norm\\.weight/$(printf 'name\302\2331m\342\200\256norm.weight')/" $model >"$dir/a.gguf"
    run 0 "$SPK_BIN/spk-info" --tensors "$dir/a.gguf"
    says out 'name\u{9b}1m\u{202e}norm.weight'
    run 0 "$SPK_BIN/spk-info" --tensors --json "$dir/a.gguf"
    says out '"name\u009b1m\u202enorm.weight"'
    python3 -c 'import json, sys; names = [t["name"] for t in json.load(open(sys.argv[1]))["tensors"]]; sys.exit("name\x9b1m\u202enorm.weight" not in names)' \
        "$dir/out" || fail "the JSON does not have the name"
}

# What a model says is not a name: it comes as it is.
generated_text_is_raw() {
    "$SPK_BIN/spk-run" --prompt 'In the beginning' -n 8 $model >"$dir/out" 2>"$dir/err" || fail "$(cat "$dir/err")"
    "$SPK_BIN/spk-run" --json --prompt 'In the beginning' -n 8 $model >"$dir/json" 2>"$dir/err" || fail "$(cat "$dir/err")"
    python3 - "$dir" <<'PY' || fail "text and JSON differ"
import json, sys
raw = open(sys.argv[1] + "/out", "rb").read().decode()
sys.exit(raw != json.load(open(sys.argv[1] + "/json"))["text"] + "\n")
PY
}

for name in names provenance tensors generated_text_is_raw; do check $name; done
exit $failed
