#!/usr/bin/env bash
# tests/gpu_proof.sh - on a machine with a GPU, from the root of the tree: is the GPU backend right, and how fast is it?  One
# line for each point, the tables of spk-bench after them, and at the end "N passed, N failed, N skipped".
#
#   tests/gpu_proof.sh [--quick] [--only LIST] [--keep DIR] [--backend NAME]
#
#   --quick      the small models only: points 0 and 1, a minute or two
#   --only LIST  of these points, with commas; in order:
#                  0 the test programs that need a GPU, and the kernel checker
#                  1 small models: GPU against ref, the same bits twice, compute-sanitizer
#                  2 full-size random models: layers against the CPU reference
#                  3 the same: speed, and what each fused kernel is worth
#                  4 the same: load time
#   --keep DIR   keep models and packs there, and use those that are there: 43 GB, 20 more for the `fast` pack
#   --backend N  cpu tries this script out without a GPU; its figures mean nothing
#
# BIN=dir takes programs that were built elsewhere (tests in dir/../tests, or TBIN); without it `make` builds them.  COMMIT=text
# names the commit where git cannot.  Points 2 to 4 need python3 with numpy and 66 GB of disk (46 without the fast pack, which
# is left out where there is less), 8 GB of memory and as much on the GPU as a pack takes.
set -u
backend=cuda quick=no only=0,1,2,3,4 keep=
usage() { echo "usage: tests/gpu_proof.sh [--quick] [--only LIST] [--keep DIR] [--backend NAME]" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=yes only=0,1 ;;
        --only) only=${2:?}; shift ;;
        --keep) keep=${2:?}; shift ;;
        --backend) backend=${2:?}; shift ;;
        *) usage ;;
    esac
    shift
done
wants() { case ,$only, in *,$1,*) true ;; *) false ;; esac; }

# What must hold.
KL_MAX=0.001 TOP1_MIN=0.985             # GPU against ref, mean KL in nats and share of the same most likely token
SAFE_MIN=(128:900 4096:850 32768:650)   # tok/s of the safe pack, by context
SAFE_4096_SHARE_MIN=0.9                 # at 4,096, of that at 128
LOAD_S_MAX=0.9                          # a pack from the page cache, verified, and the first token; after CUDA's own start
ACCOUNT_SHARE_MIN=0.95                  # of a step's time, in the phases that it is taken apart into
OTHER_MEMORY_MAX=300000000              # bytes on the GPU that are neither weights nor caches and states

switch_names=router,addnorm3,shexp,gdn-conv,gdn-core,held

# Sizes, smaller to try the script out.
contexts=128,512,4096,16384,32768 tokens=128 text_tokens=1000000 same_tokens=10000 layers=()
[ $quick = yes ] && text_tokens=4097
[ "$backend" = cuda ] || contexts=128,512,4096 tokens=4 text_tokens=513 same_tokens=200 layers=(--layers 4 --vocab 4096)

bin=${BIN:-build/bin}
[ -n "${BIN:-}" ] || make "-j$(nproc)" all build/tests/checkkern \
    $(for t in tests/gpu_*.c tests/gpu_*.cu; do [ -e "$t" ] && basename "${t%.*}"; done | sed 's|^|build/tests/|') >&2 || exit 1
tbin=${TBIN:-$bin/../tests}
work=${keep:-$(mktemp -d)}
mkdir -p "$work"
[ -n "$keep" ] || trap 'rm -rf "$work"' EXIT
log=$work/proof.log tables=$work/proof.tables json=$work/proof.json
: >"$tables"

# ---- The table ----
passed=0 failed=0 skipped=0
# row POINT ok|FAIL|SKIP|- WHAT FIGURE; '-' is a figure without a verdict.
row() {
    case $2 in ok) passed=$((passed + 1)) ;; FAIL) failed=$((failed + 1)) ;; SKIP) skipped=$((skipped + 1)) ;; esac
    printf '%s  %-4s  %-62s  %s\n' "$@"
    [ "$2" != FAIL ] || sed 's/^/           | /' "$log" | tail -n 8
}
holds() { awk "BEGIN { exit !($1) }"; }
verdict() { if holds "$1"; then echo ok; else echo FAIL; fi; }
# field KEY [N]: of the JSON that a tool wrote last, the N-th KEY.
field() { sed -n "s/^[[:space:]{]*\"$1\":[[:space:]]*\([^,]*\),\{0,1\}$/\1/p" "$json" | sed -n "${2:-1}p"; }
# rate MODEL CONTEXT: decode speed in the last report of spk-bench; MODEL counts from 0.
rate() {
    $python -c 'import json, sys
m = json.load(open(sys.argv[1]))["models"][int(sys.argv[2])]
print(next(d["tok_per_s"] for d in m["decode"] if d["context"] == int(sys.argv[3])))' "$json" "$1" "$2"
}
note() { echo "gpu_proof: $*" >&2; }
keep_table() { { echo; echo "== $1"; cat "$log"; } >>"$tables"; }

finish() {
    cat "$tables"
    echo
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

# ---- The machine ----
python=python3
$python -c 'import numpy' 2>/dev/null || python=/usr/bin/python3
small=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
commit=$(git rev-parse --short HEAD 2>/dev/null) || commit=
if [ -n "$commit" ]; then git diff --quiet HEAD 2>/dev/null || commit="$commit, changed"; fi
echo "date     $(date -u '+%Y-%m-%d %H:%M UTC')"
echo "commit   ${COMMIT:-${commit:-unknown}}"
echo "machine  $(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1), $(nproc) CPUs, $(awk '/MemTotal/ { printf "%.0f GB", $2 / 1e6 }' /proc/meminfo), $(uname -sr)"
if ! "$bin/spk-bench" --backend "$backend" --contexts 1 --tokens 1 --prompt 1 --repeats 1 "$small" >"$log" 2>&1; then
    row - SKIP "everything" "$(tail -n 1 "$log")"
    finish
fi
sed -n 's/^GPU /GPU      /p; s/^driver /driver   /p; s/^read bandwidth /read     /p' "$log"
echo

# ---- 0: test programs ----
test_program() {        # PATH ARGUMENT...
    local counts ok what rc
    what="$(basename "$1") ${*:2}"
    note "$what"
    timeout 600 "$@" >"$log" 2>&1 </dev/null
    rc=$?
    ok=$(grep -c '^ok ' "$log")
    counts="$ok ok, $(grep -c '^FAIL ' "$log") failed, $(grep -c '^SKIP ' "$log") skipped"
    if [ $rc -eq 77 ] || { [ $rc -eq 0 ] && [ "$ok" -eq 0 ]; }; then row 0 SKIP "$what" "$(tail -n 1 "$log")"
    elif [ $rc -eq 0 ]; then row 0 ok "$what" "$counts"
    else row 0 FAIL "$what" "$counts; exit status $rc"; fi
    keep_table "$what"
}
if wants 0; then
    # Where make has not unpacked it: tests are looked for beside the tools.
    bf16=build/models/tiny-qwen36-bf16.gguf
    [ -f $bf16 ] || { mkdir -p build/models && zstd -q -d -f -o $bf16 tests/models/tiny-qwen36-bf16.gguf.zst; } 2>/dev/null
    for program in "$tbin"/gpu_*; do
        if [ -x "$program" ]; then test_program "$program"; fi
    done
    if [ -x "$tbin/checkkern" ]; then test_program "$tbin/checkkern" --cuda --bench; fi
fi

# ---- 1: small models ----
# compare NAME PACK WHAT ARGUMENT...: the pack on the GPU against itself on ref.
compare() {
    local name=$1 pack=$2 what=$3
    shift 3
    if ! "$bin/spk-compare" --base-backend ref --backend "$backend" --force --json "$json" "$@" "$pack" "$pack" >"$log" 2>&1; then
        row 1 FAIL "$name against ref, $what" "spk-compare failed"
        return
    fi
    row 1 "$(verdict "$(field kl_mean) <= $KL_MAX && $(field top1) >= $TOP1_MIN")" "$name against ref, $what" \
        "$(printf 'mean KL %.6f, same top-1 %.2f %%, %d positions' "$(field kl_mean)" \
           "$(awk "BEGIN { print 100 * $(field top1) }")" "$(field positions)")"
}
# same_bits NAME PACK TOKEN_FILE: all logits of two runs.
same_bits() {
    local count
    count=$(tr -s ' ,\n' '\n' <"$3" | grep -c .)
    for i in 1 2; do
        "$bin/spk-run" --backend "$backend" --tokens "$3" --force --logits "$work/logits.$i" "$2" >"$log" 2>&1 ||
            { row 1 FAIL "$1: the same bits twice" "spk-run failed"; return; }
    done
    if cmp "$work/logits.1" "$work/logits.2" >"$log" 2>&1; then row 1 ok "$1: the same bits twice" "logits of $count tokens"
    else row 1 FAIL "$1: the same bits twice" "logits of $count tokens differ"; fi
    rm -f "$work"/logits.[12]
}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer /opt/nvidia/nsight-compute/*/host/*/compute-sanitizer 2>/dev/null | head -n 1)
sanitize() {            # NAME PACK TOOL [ARGUMENT...]
    local what="$1: compute-sanitizer $3${4:+, $4 all}" pack=$2 tool=$3
    shift 3
    if [ "$backend" != cuda ] || [ -z "$sanitizer" ]; then
        row 1 SKIP "$what" "there is none"
        return
    fi
    "$sanitizer" --tool "$tool" --error-exitcode 9 "$bin/spk-run" --backend cuda --tokens "$work/few" -n 4 "$@" "$pack" >"$log" 2>&1
    local rc=$?
    if grep -q 'Device not supported' "$log"; then row 1 SKIP "$what" "the tool does not take this device"
    elif [ $rc -eq 0 ] && grep -qE 'SUMMARY: 0 (errors|hazards displayed)' "$log"; then
        row 1 ok "$what" "$(sed -n 's/^=* *\(.*SUMMARY.*\)/\1/p' "$log" | tail -n 1)"
    else row 1 FAIL "$what" "exit status $rc"; fi
}
small_model() {         # GGUF GOLDEN RECIPE...
    local gguf=$1 golden=$2 name pack recipe
    shift 2
    sed -n 's/.*"tokens": *\[\([^]]*\)\].*/\1/p' "$golden" >"$work/golden"
    for recipe in "$@"; do
        name="$(basename "$gguf" .gguf) $recipe"
        pack=$work/small.spk
        note "$name"
        "$bin/spk-pack" --quiet --force --recipe "$recipe" "$gguf" "$pack" >"$log" 2>&1 ||
            { row 1 FAIL "$name" "spk-pack failed"; continue; }
        compare "$name" "$pack" "golden tokens" --tokens "$work/golden"
        compare "$name" "$pack" "held-out text" --text tests/text/held-out.txt --max-tokens $text_tokens
        same_bits "$name" "$pack" "$work/golden"
    done
}
if wants 1; then
    small_model "$small" tests/golden/tiny-qwen36-ud-q4_k_m.json native ffn fast
    "$bin/spk-run" --tokenize --prompt-file tests/text/held-out.txt "$small" 2>/dev/null | tr ' ' '\n' >"$work/text"
    head -n $same_tokens "$work/text" >"$work/many"
    head -n 12 "$work/text" >"$work/few"
    same_bits "tiny-qwen36 fast" "$work/small.spk" "$work/many"
    for tool in memcheck racecheck; do
        sanitize "tiny-qwen36 fast" "$work/small.spk" $tool
        sanitize "tiny-qwen36 fast" "$work/small.spk" $tool --no-fuse $switch_names
    done
    "$bin/spk-bench" --backend "$backend" --ab $switch_names,all --contexts 64 --tokens 64 --repeats 2 \
        "$work/small.spk" >"$log" 2>&1
    rc=$?
    if [ "$backend" != cuda ]; then row 1 SKIP "every switch gives the same bits" "needs a GPU"
    elif [ $rc -eq 0 ]; then row 1 ok "every switch gives the same bits" "tiny-qwen36 fast, seven switches"
    else row 1 FAIL "every switch gives the same bits" "$(tail -n 1 "$log")"; fi
    small_model tests/models/tiny-qwen35-q4_k_m.gguf tests/golden/tiny-qwen35-q4_k_m.json native
    small_model tests/models/tiny-qwen3moe-q4_k_m.gguf tests/golden/tiny-qwen3moe-q4_k_m.json native
    for tool in memcheck racecheck; do sanitize "tiny-qwen3moe native" "$work/small.spk" $tool; done
    if zstd -q -d -f -o "$work/tiny-qwen36-bf16.gguf" tests/models/tiny-qwen36-bf16.gguf.zst 2>"$log"; then
        small_model "$work/tiny-qwen36-bf16.gguf" tests/golden/tiny-qwen36-bf16.json native
    else
        row 1 SKIP "tiny-qwen36-bf16 native" "zstd is not here"
    fi
    rm -f "$work/small.spk" "$work/tiny-qwen36-bf16.gguf"
fi

# ---- 2, 3, 4: full size ----
room() { df -P -B1000000000 "$work" | awk 'NR == 2 { print $4 }'; }
make_gguf() {           # MODEL: the file, once
    [ -f "$work/$1.gguf" ] && return
    note "writing $1.gguf"
    $python tests/peer/synth_gguf.py "$work/$1.gguf.partial" --model "$1" "${layers[@]}" >"$log" 2>&1 &&
        mv "$work/$1.gguf.partial" "$work/$1.gguf"
}
make_pack() {           # MODEL RECIPE: the pack, once, from the file, which is made for it
    [ -f "$work/$1-$2.spk" ] && return
    make_gguf "$1" || return
    note "packing $1 $2"
    local start=$EPOCHREALTIME
    "$bin/spk-pack" --quiet --force --recipe "$2" "$work/$1.gguf" "$work/$1-$2.spk" >"$log" 2>&1 || return
    row 3 - "packing $1 $2" "$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f s", b - a }')"
}
layers_against_ref() {  # NAME PACK
    if [ ! -x "$tbin/gpu_layers" ]; then row 2 SKIP "$1: layers against the CPU reference" "there is no $tbin/gpu_layers"; return; fi
    note "layers of $1"
    "$tbin/gpu_layers" "$2" >"$log" 2>&1
    local rc=$? figure
    figure=$(grep -vE '^(ok|FAIL) ' "$log" | tail -n 1)
    if [ $rc -ne 0 ]; then row 2 FAIL "$1: layers against the CPU reference" "$figure"
    elif grep -q '^SKIP ' "$log"; then row 2 SKIP "$1: layers against the CPU reference" "$figure"
    else row 2 ok "$1: layers against the CPU reference" "$figure"; fi
    keep_table "gpu_layers $1"
}
bench() {               # TITLE ARGUMENT...
    local title=$1
    shift
    note "$title"
    "$bin/spk-bench" --backend "$backend" --force --json "$json" "$@" >"$log" 2>&1
    local rc=$?
    keep_table "$title"
    return $rc
}
speed() {               # NAME PACK...: of the first pack's report the rows, of the second one the speeds
    local name=$1
    shift
    if ! bench "spk-bench $name" --contexts $contexts --tokens $tokens --prompt 512 --repeats 3 "$@"; then
        row 3 FAIL "$name: spk-bench" "$(tail -n 1 "$log")"
        return 1
    fi
    row 3 - "$name: decode, tok/s, medians of 3" "$(for c in ${contexts//,/ }; do printf '%s: %.0f  ' "$c" "$(rate 0 "$c")"; done)"
    [ $# -lt 2 ] ||
        row 3 - "fast beside it" "$(for c in ${contexts//,/ }; do printf '%s: %.0f  ' "$c" "$(rate 1 "$c")"; done)"
    if [ "$backend" = cuda ]; then
        local other
        other=$(awk "BEGIN { printf \"%d\", $(field device_bytes) - $(field weight_bytes) - $(field state_bytes) }")
        row 3 "$(verdict "$other <= $OTHER_MEMORY_MAX")" "$name: device memory beyond weights and state" \
            "$(awk "BEGIN { printf \"%.0f MB of at most %.0f\", $other / 1e6, $OTHER_MEMORY_MAX / 1e6 }")"
    fi
}
load() {                # NAME PACK
    local i seconds= best cold
    note "loading $1"
    cat "$2" >/dev/null
    for i in 1 2 3; do
        "$bin/spk-bench" --backend "$backend" --force --json "$json" --contexts 1 --tokens 1 --prompt 1 --repeats 1 "$2" >"$log" 2>&1 ||
            { row 4 FAIL "$1: load" "$(tail -n 1 "$log")"; return; }
        seconds="$seconds $(awk "BEGIN { print $(field load_s) + $(field first_token_s) }")"
    done
    best=$(tr ' ' '\n' <<<"$seconds" | grep . | sort -n | sed -n 2p)
    row 4 "$(verdict "$best <= $LOAD_S_MAX")" "$1: load from the page cache and first token, median of 3" "$(printf '%.3f s of at most %.1f' "$best" $LOAD_S_MAX)"
    if [ "$(stat -f -c %T "$2")" = tmpfs ]; then
        row 4 SKIP "$1: load from the disk and first token" "$work is in memory"
        return
    fi
    dd of="$2" oflag=nocache conv=notrunc,fdatasync count=0 status=none 2>/dev/null       # forget its pages
    "$bin/spk-bench" --backend "$backend" --force --json "$json" --contexts 1 --tokens 1 --prompt 1 --repeats 1 "$2" >"$log" 2>&1
    cold=$(awk "BEGIN { print $(field load_s) + $(field first_token_s) }")
    row 4 - "$1: load from the disk and first token" "$(printf '%.3f s' "$cold")"
    keep_table "load of $1, from the disk"
}
switches() {            # NAME PACK
    if [ "$backend" != cuda ]; then row 3 SKIP "$1: what each switch is worth" "needs a GPU"; return; fi
    if bench "switches of $1" --ab $switch_names,all --contexts 128,4096 --tokens $tokens --repeats 3 "$2"
    then row 3 ok "$1: every switch gives the same bits" "table below"
    else row 3 FAIL "$1: every switch gives the same bits" "$(tail -n 1 "$log")"; fi
}

account() {             # NAME PACK: where a step's time goes
    if [ "$backend" != cuda ]; then row 3 SKIP "$1: account of a step" "needs a GPU"; return; fi
    if ! bench "account of $1" --account --contexts 128,4096 --tokens $tokens --prompt 16 --repeats 3 "$2"; then
        row 3 FAIL "$1: account of a step" "$(tail -n 1 "$log")"
        return
    fi
    row 3 "$(verdict "$(field sum_s) >= $ACCOUNT_SHARE_MIN * $(field step_s) && $(field sum_s) * $ACCOUNT_SHARE_MIN <= $(field step_s)")" \
        "$1: account of a step at 128" "$(awk "BEGIN { printf \"phases add up to %.1f us of %.1f\", $(field sum_s) * 1e6, $(field step_s) * 1e6 }")"
}

full_size() { wants 2 || wants 3 || wants 4; }
if full_size && ! $python -c 'import numpy' 2>"$log"; then
    row 2 SKIP "full-size models" "python3 has no numpy"
elif full_size && [ "$backend" = cuda ] && [ ! -f "$work/qwen36-safe.spk" ] && [ "$(room)" -lt 46 ]; then
    row 2 SKIP "full-size models" "$(room) GB of disk in $work, 46 are needed"
elif full_size; then
    safe=$work/qwen36-safe.spk fast=$work/qwen36-fast.spk
    if ! make_pack qwen36 safe; then
        row 3 FAIL "making the qwen36 pack" "$(tail -n 1 "$log")"
    else
        packs=("$safe")
        if wants 3 && { [ -f "$fast" ] || [ "$(room)" -ge 21 ]; } && make_pack qwen36 fast; then packs+=("$fast")
        elif wants 3; then row 3 SKIP "qwen36 fast" "$(room) GB of disk left in $work, 21 are needed"; fi
        [ -n "$keep" ] || rm -f "$work/qwen36.gguf"
        if wants 2; then layers_against_ref "qwen36 safe" "$safe"; fi
        if wants 4; then load "qwen36 safe" "$safe"; fi
        if wants 3; then
            cat "${packs[@]}" >/dev/null
            if speed "qwen36 safe" "${packs[@]}" && [ "$backend" = cuda ]; then
                for limit in "${SAFE_MIN[@]}"; do
                    at=${limit%:*} least=${limit#*:}
                    row 3 "$(verdict "$(rate 0 "$at") >= $least")" "qwen36 safe: decode at $at" "$(rate 0 "$at") tok/s of at least $least"
                done
                at_128=$(rate 0 128) at_4096=$(rate 0 4096)
                row 3 "$(verdict "$at_4096 >= $SAFE_4096_SHARE_MIN * $at_128")" "qwen36 safe: decode at 4096" \
                    "$(awk "BEGIN { printf \"%.1f %% of that at 128, at least %.0f\", 100 * $at_4096 / $at_128, 100 * $SAFE_4096_SHARE_MIN }")"
            fi
            account "qwen36 safe" "$safe"
            switches "qwen36 safe" "$safe"
        fi
        [ -n "$keep" ] || rm -f "$safe" "$fast"
    fi
    if ! make_pack qwen30 native; then
        row 3 FAIL "making the qwen30 pack" "$(tail -n 1 "$log")"
    else
        native=$work/qwen30-native.spk
        [ -n "$keep" ] || rm -f "$work/qwen30.gguf"
        if wants 2; then layers_against_ref "qwen30 native" "$native"; fi
        if wants 3; then
            speed "qwen30 native" "$native"
            account "qwen30 native" "$native"
        fi
    fi
fi
rm -f "$work/golden" "$work/text" "$work/many" "$work/few"
finish
