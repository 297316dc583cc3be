#!/usr/bin/env bash
# tests/peer/bench.sh BIN_DIR - spk beside llama.cpp on this machine: decode, prompt, requantizing, packing.  A few
# minutes and 12 GB of disk; run from the root of the tree, on a machine that does nothing else.
#
# The model has the tensors of four layers of Qwen3.6-35B-A3B and random weights (synth_gguf.py).  The two programs take
# turns; medians are printed.  llama-bench is compiled from llama.cpp's source against its shipped libraries; its
# quantizer is called through the same library.  Both use two threads (SPK_BENCH_THREADS).
set -eu
bin=${1:?usage: tests/peer/bench.sh BIN_DIR}
. tests/peer/common.sh
rounds=${SPK_BENCH_ROUNDS:-3}
export SPK_BENCH_THREADS=${SPK_BENCH_THREADS:-2}
threads=$SPK_BENCH_THREADS

install_tools
fetch_all || die "the npm registry cannot be reached"
compile tests/peer/peer.c "$peer/peer" "$bin"
python=python3
$python -c 'import numpy' 2>/dev/null || python=/usr/bin/python3
$python -c 'import numpy' 2>/dev/null || die "numpy is needed (apt-get install python3-numpy)"
if [ ! -x "$peer/llama-bench" ]; then
    src=$peer/llama-src
    ${CXX:-c++} -std=c++17 -O2 -I"$src/include" -I"$src/ggml/include" -I"$src/common" -I"$src/vendor" \
        "$src"/tools/llama-bench/{llama-bench,main}.cpp -o "$peer/llama-bench" "$libs/libllama-common.so" \
        "$libs"/libllama.v*.so "$libs"/libggml.v*.so "$libs/libggml-base.so" -Wl,-rpath,"$libs" -pthread
fi
model=$PWD/$peer/bench.gguf
pack=$PWD/$peer/bench.spk
out=$PWD/$peer/bench.out
log=$peer/bench.log
trap 'rm -f "$out"' EXIT
[ -f "$model" ] || { $python tests/peer/synth_gguf.py "$model.partial" --layers 4 >&2 && mv "$model.partial" "$model"; }

: >"$log"
seconds() {         # of a command, begun when nothing is left to write
    sync
    local start=$EPOCHREALTIME
    "$@" >"$peer/bench.last" 2>&1
    awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.3f\n", b - a }'
}
note() { echo "$*" >>"$log"; echo "  $*" >&2; }

model_bytes=$(stat -c %s "$model")
note model_bytes "$model_bytes"
cat "$model" >/dev/null                 # both read from the page cache
for round in $(seq "$rounds"); do
    rm -f "$out" "$pack"
    note write_s "$(seconds dd if="$model" of="$out" bs=4M conv=fsync status=none)"
    rm -f "$out"
    note pack_s "$(seconds "$bin/spk-pack" --quiet --threads "$threads" --recipe native "$model" "$pack")"
    note our_requant_s "$(seconds "$bin/spk-pack" --quiet --force --threads "$threads" --recipe ffn "$model" "$out")"
    note our_fast_s "$(seconds "$bin/spk-pack" --quiet --force --threads "$threads" --effort fast --recipe ffn "$model" "$out")"
    rm -f "$out"
    note their_requant_s "$(seconds "$peer/peer" "$libs" requant "$model" "$out" Q4_K ffn_gate_shexp ffn_up_shexp \
        ffn_down_shexp ffn_down_exps)"
    note requant_weights "$(sed -n 's/.* \([0-9]*\) weights.*/\1/p' "$peer/bench.last")"
    rm -f "$out"
done
for round in $(seq "$rounds"); do
    # llama.cpp looks for its backends in the current folder.
    (cd "$libs" && ../../../llama-bench -m "$model" -t "$threads" -p 64 -n 32 -r 1 -o jsonl 2>/dev/null) \
        >"$peer/bench.theirs"
    while IFS= read -r line; do note theirs "$line"; done <"$peer/bench.theirs"
    "$bin/spk-bench" --threads "$threads" --prompt 64 --contexts 1 --tokens 32 --repeats 1 --force --json "$peer/bench.ours" \
        "$pack" >/dev/null
    note ours "$(tr -d '\n\t' <"$peer/bench.ours")"
done
rm -f "$pack"
commit=$(git rev-parse --short HEAD 2>/dev/null) || commit=unknown
[ "$commit" = unknown ] || git diff --quiet HEAD || commit="$commit, changed"
python3 tests/peer/bench_report.py "$log" "$commit"
