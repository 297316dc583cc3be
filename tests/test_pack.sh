#!/usr/bin/env bash
# tests/test_pack.sh - spk-pack and spk-unpack as commands: exit statuses, messages, and that a failure leaves nothing.
set -u
pack=$SPK_BIN/spk-pack unpack=$SPK_BIN/spk-unpack
tiny=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
moe=tests/models/tiny-qwen3moe-q4_k_m.gguf
bf16=build/models/tiny-qwen36-bf16.gguf
. tests/cases.sh

# Files in the work directory besides out and err, as one line.
files() { (cd "$dir" && find . -type f ! -name out ! -name err | sort | tr '\n' ' '); }
expect_files() { [ "$(files)" = "$1" ] || fail "files are '$(files)', expected '$1'"; }

help_and_version() {
    for tool in "$pack" "$unpack"; do
        run 0 "$tool" --help; says out "usage: "; says out "exit status: 0 done"
        run 0 "$tool" -h; says out "usage: "
        run 0 "$tool" --version; grep -qE '^spk-(un)?pack [0-9.]+$' "$dir/out" || fail "version: $(cat "$dir/out")"
    done
    run 0 "$pack" -h; says out "  --source-weights F "
    for recipe in native ffn safe fast; do says out "  $recipe "; done
}

wrong_usage_is_status_2() {
    run 2 "$pack"; says err "found 0 paths"
    run 2 "$pack" "$tiny"; says err "found 1 path"
    run 2 "$pack" "$tiny" "$dir/a" "$dir/b"; says err "found 3 paths"
    run 2 "$pack" --frobnicate "$tiny" "$dir/a"; says err "unknown option '--frobnicate'"
    run 2 "$pack" -x "$tiny" "$dir/a"; says err "unknown option '-x'"
    run 2 "$pack" "$tiny" "$dir/a" --recipe; says err "--recipe needs a value"
    run 2 "$pack" "$tiny" "$dir/a" --source-weights; says err "--source-weights needs a value"
    for n in 0 -1 2x 1025 99999999999999999999; do
        run 2 "$pack" --threads $n "$tiny" "$dir/a"; says err "--threads '$n'"
    done
    run 2 "$pack" --effort hard "$tiny" "$dir/a"; says err "--effort 'hard': expected fast, normal or best"
    run 2 "$pack" --device gpu "$tiny" "$dir/a"; says err "--device 'gpu': expected auto, cpu or cuda"
    run 2 "$pack" --device cuda --calibration x "$tiny" "$dir/a"; says err "--device cuda: what --calibration is for"
    run 2 "$pack" --set nonsense "$tiny" "$dir/a"; says err "REGEX=TYPE"
    run 2 "$pack" --set 'output\.weight=Q3_K' "$tiny" "$dir/a"; says err "cannot requantize to 'Q3_K'"
    says err "--set 'output\.weight=Q3_K': cannot"       # no line number
    printf 'recipe x\nrule a F32 to Q4_K\n' >"$dir/x.recipe"
    run 2 "$pack" --recipe "$dir/x.recipe" "$tiny" "$dir/a"; says err "x.recipe:2: "
    run 2 "$unpack" "$dir/a"; says err "found 1 path"
    run 2 "$unpack" --fast "$dir/a" "$dir/b"; says err "unknown option '--fast'"
    expect_files "./x.recipe "
}

a_pack_is_made_and_reported() {
    run 0 "$pack" "$tiny" "$dir/a.spk"
    says out "recipe     ffn (default)"
    says out "rule blk\\.\\d+\\.ffn_down_exps\\.weight Q5_K,Q6_K -> Q4_K"
    says out "rel. RMSE"; says out "cosine"; says out "per token"; says out "copied     F32      73 tensors"
    [ "$(grep -c '^  blk' "$dir/out")" -eq 32 ] || fail "not one line for each of 32 requantized tensors"
    [ ! -s "$dir/err" ] || fail "stderr: $(cat "$dir/err")"
    expect_files "./a.spk "
}

json_is_complete() {
    run 0 "$pack" --json --recipe fast "$tiny" "$dir/a.spk"
    for key in source model recipe recipe_text requantized copied relative_rmse max_abs_error cosine \
        token_bytes_before token_bytes_after pack_bytes seconds imatrix_fallbacks; do says out "\"$key\":"; done
    says out "\"pack_bytes\":	$(stat -c %s "$dir/a.spk")"
    if command -v python3 >/dev/null; then python3 -m json.tool "$dir/out" >/dev/null || fail "not JSON"; fi
    run 0 "$pack" --json --dry-run "$tiny"; says out '"dry_run":	true'
    grep -q relative_rmse "$dir/out" && fail "a dry run cannot know errors"
}

# Sum of squares of the relative errors that the pack of the last run was reported with.
total_error() { awk -F: '/"relative_rmse"/ { s += $2 * $2 } END { printf "%.12f\n", s }' "$dir/out"; }

more_effort_leaves_less_error_and_is_recorded() {
    local effort error last=1 threads
    for effort in fast normal best; do
        for threads in 1 2; do
            run 0 "$pack" --json --recipe ffn --effort $effort --threads $threads "$tiny" "$dir/$effort-$threads.spk"
        done
        says out "\"effort\":	\"$effort\""
        error=$(total_error)
        awk -v a="$error" -v b=$last 'BEGIN { exit !(a > 0 && a < 0.998 * b) }' || fail "$effort: $error, before $last"
        last=$error
        cmp -s "$dir/$effort-1.spk" "$dir/$effort-2.spk" || fail "$effort: the number of threads changes the pack"
        run 0 "$SPK_BIN/spk-info" "$dir/$effort-1.spk"
        case $effort in
            normal) grep -q 'effort' "$dir/out" && fail "the usual effort is not worth a word" ;;
            *) says out ", effort $effort" ;;
        esac
    done
    run 0 "$pack" --recipe ffn "$tiny" "$dir/a.spk"
    cmp -s "$dir/a.spk" "$dir/normal-1.spk" || fail "normal is not the default"
}

a_device_never_changes_the_pack() {
    local device
    for device in cpu auto; do
        run 0 "$pack" --json --recipe fast --device $device "$tiny" "$dir/device-$device.spk"; says out '"device":	"cpu"'
    done
    if "$pack" --json --recipe fast --device cuda "$tiny" "$dir/device-cuda.spk" >"$dir/out" 2>"$dir/err"; then
        says out '"device":	"cuda"'
        cmp -s "$dir/device-cpu.spk" "$dir/device-cuda.spk" || fail "a GPU changes the pack"
    else
        says err '--device cuda: GPU quantizer: '
        [ ! -e "$dir/device-cuda.spk" ] || fail "a pack is left"
    fi
    cmp -s "$dir/device-cpu.spk" "$dir/device-auto.spk" || fail "the device changes the pack"
}

a_dry_run_touches_nothing() {
    echo old >"$dir/a.spk"
    run 0 "$pack" --dry-run "$tiny"; says out "dry run: nothing was written"; says out "Q5_K -> Q4_K"
    run 0 "$pack" --dry-run --force --recipe fast "$tiny" "$dir/a.spk"; says out "output.weight"
    run 0 "$pack" --dry-run "$tiny" "$dir/no/such/dir/x.spk"
    [ "$(cat "$dir/a.spk")" = old ] || fail "the dry run wrote"
    expect_files "./a.spk "
}

a_model_without_a_default_is_packed_natively_and_told() {
    run 0 "$pack" "$moe" "$dir/a.spk"; says out "recipe     native: "   # and not "native (default)"
    run 0 "$pack" --json --dry-run "$moe"; says out '"recipe_is_default":	false'
    run 0 "$pack" --json --dry-run "$tiny"; says out '"recipe_is_default":	true'
    run 0 "$pack" --force "$moe" "$dir/a.spk"
    says err "no recipe is the default of this model (qwen3moe"
    run 0 "$pack" --quiet --force "$moe" "$dir/a.spk"
    [ ! -s "$dir/err" ] || fail "--quiet: $(cat "$dir/err")"
    run 0 "$pack" --recipe native --force "$moe" "$dir/a.spk"
    [ ! -s "$dir/err" ] || fail "asked for, yet: $(cat "$dir/err")"
    run 1 "$pack" --recipe ffn --force "$moe" "$dir/a.spk"; says err "ffn_(gate|up|down)_shexp"
    says err "$moe: recipe ffn: rule"                    # which file it does not fit
}

# A typo is no reason to pack something else: not where the recipe is a default, nor where it falls back to native.
a_set_that_matches_nothing_is_an_error() {
    for model in "$tiny" "$moe" "$bf16"; do
        [ -e "$model" ] || continue
        run 1 "$pack" --set 'nosuch=Q8_0' "$model" "$dir/a.spk"
        says err "$model: rule 'nosuch * -> Q8_0' of --set matches no tensor"
        grep -q "default" "$dir/err" && fail "blames the default: $(cat "$dir/err")"
    done
    expect_files ""
}

a_tokenizer_that_spk_run_cannot_use_is_told() {
    LC_ALL=C sed 's/tokenizer.ggml.merges/tokenizer.ggml.mergee/' "$tiny" >"$dir/no-merges.gguf"
    LC_ALL=C sed 's/gpt2/bert/' "$tiny" >"$dir/bert.gguf"
    run 0 "$pack" --dry-run "$dir/no-merges.gguf"
    says err "spk-run will have no tokenizer for this model: $dir/no-merges.gguf: no metadata key tokenizer.ggml.merges"
    [ "$(wc -l <"$dir/err")" -eq 1 ] || fail "more than a line: $(cat "$dir/err")"
    run 0 "$pack" --quiet "$dir/no-merges.gguf" "$dir/a.spk"
    [ ! -s "$dir/err" ] || fail "--quiet: $(cat "$dir/err")"
    run 0 "$pack" --dry-run "$dir/bert.gguf"; says err "bert.gguf: tokenizer model 'bert' is not supported"
}

a_default_that_does_not_fit_the_types_is_told() {
    if [ ! -e "$bf16" ]; then skip "$bf16 is not there"; return; fi
    run 0 "$pack" "$bf16" "$dir/a.spk"; says out "recipe     native"
    says err "default does not fit"; says err "using 'native'"
    run 1 "$pack" --recipe ffn "$bf16" "$dir/b.spk"; says err "BF16"
    run 1 "$pack" --imatrix tests/models/tiny-qwen36.imatrix.gguf "$bf16" "$dir/b.spk"
    expect_files "./a.spk "
}

existing_files_and_inputs_are_kept() {
    cp "$tiny" "$dir/in.gguf"
    cp tests/models/tiny-qwen36.imatrix.gguf "$dir/i.gguf"
    ln "$dir/in.gguf" "$dir/hard.gguf"
    echo old >"$dir/a.spk"
    run 1 "$pack" "$tiny" "$dir/a.spk"; says err "exists"
    [ "$(cat "$dir/a.spk")" = old ] || fail "replaced without --force"
    run 1 "$pack" --force "$dir/in.gguf" "$dir/in.gguf"; says err "that is the input $dir/in.gguf"
    run 1 "$pack" --force "$dir/in.gguf" "$dir/../$(basename "$dir")/hard.gguf"; says err "that is the input $dir/in.gguf"
    run 1 "$pack" --force --imatrix "$dir/i.gguf" "$dir/in.gguf" "$dir/i.gguf"; says err "that is the input $dir/i.gguf"
    run 1 "$pack" --force "$tiny" "$dir"; says err "directory"
    cmp -s "$tiny" "$dir/in.gguf" || fail "the source changed"
    run 0 "$pack" --force "$tiny" "$dir/a.spk"
    expect_files "./a.spk ./hard.gguf ./i.gguf ./in.gguf "
}

a_bad_input_is_one_line_and_leaves_nothing() {
    head -c 1000000 "$tiny" >"$dir/cut.gguf"
    : >"$dir/empty.gguf"
    mkfifo "$dir/fifo"
    run 1 "$pack" "$dir/cut.gguf" "$dir/a.spk"; says err "cut.gguf"
    run 1 "$pack" "$dir/empty.gguf" "$dir/a.spk"; says err "empty.gguf"
    run 1 "$pack" "$dir/none.gguf" "$dir/a.spk"; says err "none.gguf"
    run 1 "$pack" "$dir" "$dir/a.spk"
    run 1 timeout 10 "$pack" "$dir/fifo" "$dir/a.spk"; says err "fifo: is a pipe"
    run 1 timeout 10 "$pack" --imatrix "$dir/fifo" "$tiny" "$dir/a.spk"; says err "fifo: is a pipe"
    run 1 timeout 10 "$pack" --recipe "$dir/fifo" "$tiny" "$dir/a.spk"; says err "fifo: is a pipe"
    run 1 timeout 10 "$unpack" "$dir/fifo" "$dir/a.gguf"; says err "fifo: is a pipe"
    run 1 "$pack" --recipe nosuch "$tiny" "$dir/a.spk"; says err "nosuch"
    run 1 "$pack" --imatrix "$tiny" "$tiny" "$dir/a.spk"
    run 1 "$pack" --set 'blk\.0\.ffn_gate_inp\.weight=Q8_0' "$tiny" "$dir/a.spk"; says err "is protected"
    run 1 "$pack" --set 'blk\.0\.nothing=Q8_0' --recipe ffn "$tiny" "$dir/a.spk"; says err "matches no tensor"
    run 1 "$pack" "$tiny" "$dir/no/such/dir/a.spk"; says err "/no/such/dir/a.spk"
    run 1 "$pack" "$tiny" "$dir/cut.gguf/a.spk"
    expect_files "./cut.gguf ./empty.gguf "
}

an_unwritable_directory_is_refused() {
    run 1 "$pack" "$tiny" /proc/a.spk; says err "/proc/a.spk"   # root may not write there either
    run 0 "$pack" "$tiny" "$dir/a.spk"
    run 1 "$unpack" "$dir/a.spk" /proc/a.gguf; says err "/proc/a.gguf"
}

a_file_size_limit_leaves_nothing() {
    (ulimit -f 4000; exec "$pack" "$tiny" "$dir/a.spk") >"$dir/out" 2>"$dir/err"
    [ $? -eq 1 ] || fail "expected status 1: $(cat "$dir/err")"
    says err "a.spk"
    [ "$(wc -l <"$dir/err")" -eq 1 ] || fail "not one line: $(cat "$dir/err")"
    expect_files ""
}

too_small_a_disk_is_told_before_the_work() {
    mkdir "$dir/small"
    if ! mount -t tmpfs -o size=4m spk-test "$dir/small" 2>/dev/null; then skip "cannot mount a tmpfs"; return; fi
    run 1 "$pack" "$tiny" "$dir/small/a.spk"; says err "needs"; says err "available"
    expect_files ""
    umount "$dir/small"
}

a_full_stdout_is_a_failure() {
    "$pack" --dry-run "$tiny" >/dev/full 2>"$dir/err"
    [ $? -eq 1 ] || fail "expected status 1"
    says err "writing the output"
}

a_terminated_run_leaves_nothing() {
    if [ ! -e "$bf16" ]; then skip "$bf16 is not there"; return; fi
    "$pack" --threads 1 --recipe native --set '.*_exps\.weight=Q6_K' "$bf16" "$dir/a.spk" >/dev/null 2>"$dir/err" &
    local pid=$! tries=0
    until compgen -G "$dir/.spk-*" >/dev/null || [ -e "$dir/a.spk" ] || [ $((tries += 1)) -gt 100000 ]; do :; done
    kill -TERM $pid 2>/dev/null
    wait $pid 2>/dev/null
    local rc=$?
    if [ $rc -eq 0 ]; then skip "the run ended before the signal came"; return; fi
    [ $rc -eq 143 ] || fail "ended with $rc, expected the signal: $(cat "$dir/err")"
    expect_files ""
}

# What a killed run left is kept by a run that fails before it writes, and by one that is ended then.
a_killed_run_is_gone_on_with() {
    if [ ! -e "$bf16" ]; then skip "$bf16 is not there"; return; fi
    local job=(--threads 1 --effort best --recipe native --set '.*_exps\.weight=Q6_K' "$bf16" "$dir/a.spk") tries=0 pid left
    "$pack" "${job[@]}" >/dev/null 2>"$dir/err" &
    pid=$!
    until [ "$(du -k "$dir"/.spk-* 2>/dev/null | cut -f 1)" -gt 9000 ] 2>/dev/null || [ -e "$dir/a.spk" ] || [ $((tries += 1)) -gt 10000 ]; do :; done
    kill -KILL $pid 2>/dev/null
    { wait $pid; } 2>/dev/null
    if [ -e "$dir/a.spk" ]; then skip "the run ended before the signal came"; return; fi
    left=$(echo "$dir"/.spk-*)
    run 1 "$pack" --resume --set 'nosuch=Q8_0' "${job[@]}"; says err "matches no tensor"
    run 1 "$pack" --resume --write-recipe "$dir/no/recipe" "${job[@]}"; says err "no/recipe"
    [ -s "$left" ] || fail "what the killed run left is gone"
    run 0 "$pack" --resume "${job[@]}"; says out "resumed    after"
    mkdir "$dir/b" && run 0 "$pack" "${job[@]:0:8}" "$bf16" "$dir/b/a.spk"
    cmp -s "$dir/a.spk" "$dir/b/a.spk" || fail "not the pack of an undisturbed run"
    expect_files "./a.spk ./b/a.spk "
}

unpacking_gives_the_source_back() {
    run 0 "$pack" --recipe native "$tiny" "$dir/a.spk"
    run 0 "$unpack" "$dir/a.spk" "$dir/a.gguf"; says err "a.gguf: identical to the source"
    cmp -s "$tiny" "$dir/a.gguf" || fail "the GGUF differs from the source"
    run 1 "$unpack" "$dir/a.spk" "$dir/a.gguf"; says err "exists"
    run 0 "$unpack" --force "$dir/a.spk" "$dir/a.gguf"
    run 1 "$unpack" --force "$dir/a.spk" "$dir/a.spk"; says err "is the pack itself"
    run 1 "$unpack" "$tiny" "$dir/b.gguf"; says err "tiny-qwen36-ud-q4_k_m.gguf"
    expect_files "./a.gguf ./a.spk "
}

# A byte of padding between the tensor list and the data that is not zero: legal, and not in a pack.
unpacking_something_else_than_the_source_is_told() {
    local name=blk.7.post_attention_norm.weight at   # the last of the list; 24 bytes follow its name
    cp "$tiny" "$dir/in.gguf"
    at=$(LC_ALL=C grep -abo "$name" "$tiny" | tail -n 1 | cut -d: -f1)
    printf '\001' | dd of="$dir/in.gguf" bs=1 seek=$((at + ${#name} + 24)) conv=notrunc status=none
    run 0 "$pack" --recipe native "$dir/in.gguf" "$dir/a.spk"
    run 0 "$unpack" "$dir/a.spk" "$dir/a.gguf"
    says err "a.gguf: same tensors and metadata, but not the same bytes as the source (padding or order"
    cmp -s "$tiny" "$dir/a.gguf" || fail "not the tensors and metadata"
    run 0 "$unpack" --quiet --force "$dir/a.spk" "$dir/a.gguf"
    [ ! -s "$dir/err" ] || fail "--quiet: $(cat "$dir/err")"
}

unpacking_a_requant_gives_a_gguf_and_says_so() {
    run 0 "$pack" --recipe ffn "$tiny" "$dir/a.spk"
    run 0 "$unpack" "$dir/a.spk" "$dir/a.gguf"; says err "32 tensors"; says err "recipe ffn"
    run 0 "$unpack" --quiet --force "$dir/a.spk" "$dir/a.gguf"
    [ ! -s "$dir/err" ] || fail "--quiet: $(cat "$dir/err")"
    run 0 "$pack" --recipe ffn "$dir/a.gguf" "$dir/b.spk"   # all are Q4_K by now: copied, and the rules count as met
    grep -q '^  blk' "$dir/out" && fail "requantized again"
    expect_files "./a.gguf ./a.spk ./b.spk "
}

a_better_source_is_used_and_told() {
    if [ ! -e "$bf16" ]; then skip "$bf16 is not there"; return; fi
    run 0 "$pack" --source-weights "$bf16" "$tiny" "$dir/a.spk"
    says out "recipe     ffn (default)"; says out "fitted     32 of 32 requantized tensors from $bf16"
    [ ! -s "$dir/err" ] || fail "stderr: $(cat "$dir/err")"
    run 0 "$SPK_BIN/spk-info" --verify "$dir/a.spk"; says out "requants   fitted from tiny-qwen36-bf16.gguf (37.0 MB"
    run 0 "$SPK_BIN/spk-info" --json "$dir/a.spk"; says out '"weights_bytes":	37007296'; says out '"weights_xxh3_128":'
    run 0 "$unpack" "$dir/a.spk" "$dir/a.gguf"; says err "32 tensors were requantized (recipe ffn)"
    run 0 "$pack" --json --dry-run --source-weights "$bf16" "$tiny"
    says out "\"source_weights\":	\"$bf16\""; says out '"fitted_from":	"BF16"'
    run 0 "$pack" --recipe native --source-weights "$bf16" "$tiny" "$dir/b.spk"
    says err "nothing is requantized, so $bf16 is not used"
    grep -q "^fitted" "$dir/out" && fail "nothing was fitted"
    run 0 "$SPK_BIN/spk-info" "$dir/b.spk"; grep -q "fitted" "$dir/out" && fail "was not used: $(cat "$dir/out")"
    run 0 "$pack" --quiet --recipe native --force --source-weights "$bf16" "$tiny" "$dir/b.spk"
    [ ! -s "$dir/err" ] || fail "--quiet: $(cat "$dir/err")"
    expect_files "./a.gguf ./a.spk ./b.spk "
}

# Each in one line, whatever the recipe is: a default does not fall back to native.
a_wrong_better_source_is_refused() {
    echo "no model" >"$dir/text.gguf"
    head -c 1000000 "$tiny" >"$dir/cut.gguf"
    mkfifo "$dir/fifo"
    run 1 "$pack" --source-weights "$dir/none.gguf" "$tiny" "$dir/a.spk"; says err "none.gguf: No such file"
    run 1 "$pack" --source-weights "$dir/text.gguf" "$tiny" "$dir/a.spk"; says err "text.gguf"
    run 1 "$pack" --source-weights "$dir/cut.gguf" "$tiny" "$dir/a.spk"; says err "cut.gguf"
    run 1 "$pack" --source-weights "$dir" "$tiny" "$dir/a.spk"; says err "is a directory"
    run 1 timeout 10 "$pack" --source-weights "$dir/fifo" "$tiny" "$dir/a.spk"; says err "fifo: is a pipe"
    run 1 "$pack" --source-weights "$moe" "$tiny" "$dir/a.spk"; says err "$moe: is another model (qwen3moe L"
    run 1 "$pack" --source-weights "$tiny" "$tiny" "$dir/a.spk"
    says err "no tensor that is requantized is more precise there than in $tiny"
    cp "$tiny" "$dir/w.gguf"
    run 1 "$pack" --force --source-weights "$dir/w.gguf" "$tiny" "$dir/w.gguf"; says err "that is the input $dir/w.gguf"
    cmp -s "$tiny" "$dir/w.gguf" || fail "the file of better weights changed"
    if [ -e "$bf16" ]; then
        run 1 "$pack" --recipe native --set 'blk\.1\.ffn_up_shexp\.weight=Q4_K' --source-weights "$tiny" "$bf16" "$dir/a.spk"
        says err "$tiny: tensor 'blk.1.ffn_up_shexp.weight' is Q8_0, less precise than in $bf16 (BF16)"
    fi
    expect_files "./cut.gguf ./text.gguf ./w.gguf "
}

for t in help_and_version wrong_usage_is_status_2 a_pack_is_made_and_reported json_is_complete \
    more_effort_leaves_less_error_and_is_recorded a_device_never_changes_the_pack a_dry_run_touches_nothing a_set_that_matches_nothing_is_an_error a_tokenizer_that_spk_run_cannot_use_is_told \
    a_model_without_a_default_is_packed_natively_and_told a_default_that_does_not_fit_the_types_is_told \
    existing_files_and_inputs_are_kept a_bad_input_is_one_line_and_leaves_nothing an_unwritable_directory_is_refused \
    a_file_size_limit_leaves_nothing too_small_a_disk_is_told_before_the_work a_full_stdout_is_a_failure \
    a_terminated_run_leaves_nothing a_killed_run_is_gone_on_with unpacking_gives_the_source_back \
    unpacking_something_else_than_the_source_is_told unpacking_a_requant_gives_a_gguf_and_says_so \
    a_better_source_is_used_and_told a_wrong_better_source_is_refused; do
    check $t
done
exit $failed
