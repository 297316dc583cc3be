#!/usr/bin/env bash
# tests/test_calibrate.sh - spk-calibrate as a command, and spk-pack --calibration with what it wrote.
set -u
calibrate=$SPK_BIN/spk-calibrate pack=$SPK_BIN/spk-pack
tiny=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
moe=tests/models/tiny-qwen3moe-q4_k_m.gguf
dense=tests/models/tiny-qwen35-q4_k_m.gguf
text=tests/text/calibration.txt
ffn=(--recipe ffn) ffn_count=32
# Under sanitizers a calibrated pack of all that takes minutes.
case $SPK_BIN in
    */san/*) ffn=(--recipe native --set 'blk\.0\.ffn_(gate|up|down)_shexp\.weight=Q4_K' --set 'blk\.0\.ffn_down_exps\.weight=Q4_K') ffn_count=4 ;;
esac
. tests/cases.sh
same() { cmp -s "$1" "$2" || fail "$1 and $2 differ"; }

help_and_wrong_usage() {
    run 0 "$calibrate" --help; says out "usage: spk-calibrate"
    run 0 "$calibrate" --version; grep -qE '^spk-calibrate [0-9.]+$' "$dir/out" || fail "version: $(cat "$dir/out")"
    run 2 "$calibrate" --text $text -o "$dir/s"; says err "expected one MODEL"
    run 2 "$calibrate" -o "$dir/s" $tiny; says err "exactly one of --text and --tokens"
    run 2 "$calibrate" --text $text $tiny; says err "expected -o FILE"
    run 2 "$calibrate" --text $text -o "$dir/s" --backend cuda $tiny; says err "cpu and ref only"
    run 2 "$calibrate" --text $text -o "$dir/s" --ctx 100000000 $tiny; says err "--ctx"
    run 2 "$pack" --imatrix a --calibration b $tiny "$dir/a.spk"; says err "expected one of them"
    [ ! -e "$dir/s" ] || fail "a file was written"
}

what_cannot_be_is_refused() {
    run 1 "$calibrate" --text "$dir/absent" -o "$dir/s" $tiny; says err absent
    run 1 "$calibrate" --text $text -o "$dir/no/s" $tiny; says err "no/s"
    : >"$dir/empty"
    run 1 "$calibrate" --text "$dir/empty" -o "$dir/s" $tiny; says err "has no tokens"
    cp $tiny "$dir/model.gguf"
    run 1 "$calibrate" --text $text -o "$dir/model.gguf" --force "$dir/model.gguf"; says err "that is the input"
    same "$dir/model.gguf" $tiny
    echo here >"$dir/s"
    run 1 "$calibrate" --text $text -o "$dir/s" $tiny; says err "exists"
    [ "$(cat "$dir/s")" = here ] || fail "the file that was there has changed"
    run 1 "$pack" --calibration tests/models/tiny-qwen36.imatrix.gguf $tiny "$dir/a.spk"; says err "has no moments"
    [ ! -e "$dir/a.spk" ] || fail "a pack was written"
}

# Enough tokens for every expert of the tiny model; any number of threads gives the same file and the same pack.
packs_with_what_was_recorded() {
    run 0 "$calibrate" --threads 1 --max-tokens 3000 --text $text -o "$dir/one" $tiny; says out "text     3000 tokens"
    run 0 "$calibrate" --threads 3 --max-tokens 3000 --text $text -o "$dir/three" $tiny
    same "$dir/one" "$dir/three"
    run 0 "$pack" --json --quiet "${ffn[@]}" $tiny "$dir/plain.spk"; cp "$dir/out" "$dir/plain.json"
    mkdir "$dir/a" && mv "$dir/three" "$dir/a/one"
    run 0 "$pack" --json --threads 1 --calibration "$dir/one" "${ffn[@]}" $tiny "$dir/one.spk"; cp "$dir/out" "$dir/one.json"
    run 0 "$pack" --threads 3 --calibration "$dir/a/one" "${ffn[@]}" $tiny "$dir/three.spk"
    same "$dir/one.spk" "$dir/three.spk"
    cmp -s "$dir/one.spk" "$dir/plain.spk" && fail "calibration changed nothing"
    run 0 "$SPK_BIN/spk-info" "$dir/one.spk"; says out "imatrix one"
    # Fitted to outputs, the weights themselves are a little further away.
    python3 - "$dir/plain.json" "$dir/one.json" $ffn_count <<'PY' || fail "errors of weights: $(cat "$dir/out")"
import json, sys
plain, one = (json.load(open(p))["requantized"] for p in sys.argv[1:3])
ratios = [b["relative_rmse"] / a["relative_rmse"] for a, b in zip(plain, one)]
sys.exit(not (len(ratios) == int(sys.argv[3]) and all(1.02 < r < 1.6 for r in ratios)))
PY
}

# spoil STATS NAME [VALUE]: a third of NAME's correlations are -1 and all others 1, which no inputs have; or, of scales, the last is VALUE.
spoil() {
    python3 - "$@" <<'PY'
import struct, sys
path, name = sys.argv[1], sys.argv[2].encode()
data = bytearray(open(path, "rb").read())
at = 24
def take(form):
    global at
    values = struct.unpack_from("<" + form, data, at)
    at += struct.calcsize("<" + form)
    return values[0]
def text():
    global at
    size = take("Q")
    at += size
    return bytes(data[at - size:at])
tensor_count, kv_count = struct.unpack_from("<QQ", data, 8)
for _ in range(kv_count):
    text()
    kind = take("I")
    if kind == 9: take("I"), take("Q"), text()
    elif kind == 8: text()
    else: take("I")
tensors = {}
for _ in range(tensor_count):
    key = text()
    dims = [take("Q") for _ in range(take("I"))]
    take("I")
    tensors[key] = (take("Q"), dims)
start = (at + 31) // 32 * 32
offset, dims = tensors[name]
count = dims[0] * dims[1]
if len(sys.argv) > 3:
    struct.pack_into("<f", data, start + offset + 4 * (count - 1), float(sys.argv[3]))
else:
    for i in range(count):
        struct.pack_into("<e", data, start + offset + 2 * i, 1 if i % 3 else -1)
open(path, "wb").write(data)
PY
}

moments_that_no_inputs_have_are_refused() {
    local kind
    run 0 "$calibrate" --max-tokens 300 --text $text -o "$dir/good" $tiny
    for kind in blk.0.ffn_down_shexp.weight.in_moment blk.0.ffn_out.metric; do
        cp "$dir/good" "$dir/s"
        spoil "$dir/s" $kind || { fail "no $kind in the file"; return; }
        for dry in '' --dry-run; do
            run 1 "$pack" $dry --calibration "$dir/s" --recipe native --set 'blk\.0\.ffn_down_shexp\.weight=Q4_K' $tiny "$dir/s.spk"
            grep -qE "s: '$kind', row [0-9]+: no inputs have such moments" "$dir/err" || fail "$dry $(cat "$dir/err")"
            [ ! -s "$dir/out" ] || fail "$dry printed: $(cat "$dir/out")"
            [ "$(cd "$dir" && echo * .spk*)" = "err good out s .spk*" ] || fail "left: $(ls -A "$dir")"
        done
    done
}

# A dry run finds what the run would: numbers of every matrix that is made from them, the first one first, for any number of threads.
a_dry_run_looks_at_the_numbers() {
    local experts=(--recipe native --set 'blk\.[01]\.ffn_down_exps\.weight=Q4_K') threads
    run 0 "$calibrate" --max-tokens 3000 --text $text -o "$dir/good" $tiny
    run 0 "$pack" --dry-run --calibration "$dir/good" "${experts[@]}" $tiny; says out "dry run: nothing was written"
    for value in nan inf -1; do
        cp "$dir/good" "$dir/s"
        spoil "$dir/s" blk.0.ffn_down_exps.weight.in_scale $value
        run 1 "$pack" --dry-run --calibration "$dir/s" "${experts[@]}" $tiny; says err "s: 'blk.0.ffn_down_exps.weight.in_moment': a scale is negative"
    done
    cp "$dir/good" "$dir/s"
    spoil "$dir/s" blk.1.ffn_down_exps.weight.in_moment
    spoil "$dir/s" blk.0.ffn_down_exps.weight.in_moment
    for threads in 1 3; do
        run 1 "$pack" --dry-run --threads $threads --calibration "$dir/s" "${experts[@]}" $tiny
        says err "s: 'blk.0.ffn_down_exps.weight.in_moment', expert 0, row "; says err "no inputs have such moments"
    done
    run 0 "$pack" --dry-run --calibration "$dir/s" --recipe native --set 'blk\.2\.ffn_down_exps\.weight=Q4_K' $tiny   # is not looked at
}

# Of 100 tokens no expert has seen as many as it has columns, nor has the shared expert.
what_was_seen_too_rarely_falls_back() {
    run 0 "$calibrate" --max-tokens 100 --text $text -o "$dir/s" $tiny; says out "8 of 8 saw fewer inputs"
    run 0 "$pack" --calibration "$dir/s" --recipe ffn $tiny "$dir/s.spk"
    says err "calibration not used for blk.0.ffn_down_exps.weight expert 7: saw fewer inputs than it has columns"
    run 0 "$pack" --quiet --recipe ffn $tiny "$dir/plain.spk"
    cmp -s <(tail -c +100000 "$dir/s.spk" | head -c 8000000) <(tail -c +100000 "$dir/plain.spk" | head -c 8000000) ||
        fail "weights are not those of the plain pack"
}

# The file is an importance matrix, too, and --importance nothing else.
is_an_imatrix() {
    run 0 "$calibrate" --max-tokens 3000 --text $text -o "$dir/s" $tiny
    run 0 "$calibrate" --max-tokens 3000 --importance --text $text -o "$dir/i" $tiny
    [ "$(stat -c %s "$dir/i")" -lt 400000 ] || fail "--importance: $(stat -c %s "$dir/i") bytes"
    mkdir "$dir/a" && cp "$dir/i" "$dir/a/s"
    run 0 "$pack" --quiet --imatrix "$dir/s" --recipe ffn $tiny "$dir/s.spk"
    run 0 "$pack" --quiet --imatrix "$dir/a/s" --recipe ffn $tiny "$dir/i.spk"
    same "$dir/s.spk" "$dir/i.spk"
    run 1 "$pack" --calibration "$dir/i" --recipe ffn $tiny "$dir/j.spk"; says err "has no moments"
}

# The file is locked from the start: the first one waits for its text here.
two_writers_of_one_file() {
    mkfifo "$dir/text"
    "$calibrate" --max-tokens 100 --text "$dir/text" -o "$dir/s" $tiny >"$dir/first" 2>&1 &
    exec 3>"$dir/text"                                   # opened by the first one now
    run 1 "$calibrate" --max-tokens 100 --text $text -o "$dir/s" $tiny; says err "s: is being written already"
    run 1 "$calibrate" --max-tokens 100 --text $text -o "$dir/s" --force $tiny; says err "s: is being written already"
    cat $text >&3
    exec 3>&-
    wait $! || fail "the first one: $(cat "$dir/first")"
    [ -s "$dir/s" ] || fail "no file"
}

# The file would have some megabytes, and the text would take minutes.
a_full_disk_is_told_before_the_work() {
    mkdir "$dir/small"
    if ! mount -t tmpfs -o size=1m spk-test "$dir/small" 2>/dev/null; then skip "cannot mount a tmpfs"; return; fi
    for _ in 1 2 3 4 5 6 7 8 9 10; do cat $text; done >"$dir/text"
    run 1 timeout 30 "$calibrate" --text "$dir/text" -o "$dir/small/s" $tiny
    grep -qE "small/s: needs [0-9]{7} bytes, but the file system has only 10[0-9]{5} bytes available" "$dir/err" || fail "$(cat "$dir/err")"
    [ -z "$(ls -A "$dir/small")" ] || fail "left: $(ls -A "$dir/small")"
    umount "$dir/small"
}

# Without a shared expert, and without experts.
takes_other_architectures() {
    for model in $moe $dense; do
        run 0 "$calibrate" --max-tokens 2000 --text $text -o "$dir/s" --force $model
        run 0 "$pack" --force --calibration "$dir/s" --recipe native --set 'blk\.0\.ffn_down.*=Q4_K' --set '.*attn_output.*=Q5_K' \
            $model "$dir/s.spk"
        says out "Q4_K"
    done
}

for name in help_and_wrong_usage what_cannot_be_is_refused packs_with_what_was_recorded moments_that_no_inputs_have_are_refused a_dry_run_looks_at_the_numbers \
            two_writers_of_one_file \
            a_full_disk_is_told_before_the_work what_was_seen_too_rarely_falls_back \
            is_an_imatrix takes_other_architectures; do
    check $name
done
exit $failed
