#!/usr/bin/env bash
# tests/demo.sh BIN_DIR - pack the bundled model, decode from the pack, measure what the smaller weights cost.
set -euo pipefail
bin=$1
model=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
pack=build/demo/tiny-qwen36.spk
mkdir -p build/demo

# run TOOL ARGUMENT...: the command as a user would type it, then the command.
run() {
    local word line="$1"
    for word in "${@:2}"; do case $word in *' '*) line="$line '$word'" ;; *) line="$line $word" ;; esac; done
    printf '\n$ %s\n' "$line"
    "$bin/$1" "${@:2}"
}

# Of the tensors that a rule requantized, the first.
shorten() {
    awk '/^  / { if (!shown) print; shown = 1; more++; next }
         { if (more > 1) print "  ... and " more - 1 " more"; shown = more = 0; print }'
}

run spk-pack --quiet --force "$model" "$pack" | shorten
run spk-run --prompt 'In the beginning God created' -n 40 "$pack"
run spk-compare --text tests/text/held-out.txt --max-tokens 4097 --max-kl 0.05 "$model" "$pack"
