#!/usr/bin/env bash
# spk-info from outside: what it says of packs and GGUF files, what --verify finds, and exit statuses.
set -u
. tests/check.sh
pack=$dir/native.spk
requantized=$dir/q4.spk

info() { "$SPK_BIN/spk-info" "$@" >"$dir/out" 2>"$dir/err"; rc=$?; }
says() { grep -qE -- "$1" "$dir/out" "$dir/err"; }
field() { sed -n "s/^[[:space:]]*\"$1\":[[:space:]]*\([^,]*\),\{0,1\}$/\1/p" "$dir/out" | sed -n "${2:-1}p"; }

"$SPK_BIN/spk-pack" --quiet --recipe native $model "$pack" >"$dir/out" 2>"$dir/err" &&
    "$SPK_BIN/spk-pack" --quiet --recipe native --set '.*ffn_down_exps.*=Q4_K' $model "$requantized" >>"$dir/out" 2>>"$dir/err"
check "packs are made" '[ $? -eq 0 ]'

"$SPK_BIN/spk-pack" --quiet --json --resume --recipe native $model "$dir/again.spk" >"$dir/out" 2>"$dir/err"
check "--resume without anything to go on with makes the same pack" '[ $? -eq 0 ] && [ "$(field resumed_bytes)" = 0 ] && cmp -s "$pack" "$dir/again.spk"'

info "$pack"
check "file, format and root" '[ $rc -eq 0 ] && says "^file .*native.spk .*$(stat -c %s "$pack") bytes" && says "^format +spk 1\.0, root [0-9a-f]{32}$"'
check "the model's fingerprint" 'says "^model +qwen35moe L8 H256 V4096 "'
check "the source" 'says "^source +tiny-qwen36-ud-q4_k_m.gguf .* 13946944 bytes, GGUF 3, alignment 32" && says "XXH3-128 [0-9a-f]{32}$"'
check "recipe and tool" 'says "^recipe +native, imatrix none, made by spk-pack [0-9.]+$"'
check "a census of types" 'says "^type +Q4_K +16 tensors +4718592 bytes$" && says "^type +Q5_K +6 tensors +2162688 bytes$"'
check "all sections" '[ "$(grep -cE "^  (CONFIG|META|STATIC|EXPERTS|EMBEDDING|TENSORS|PROVENANCE|CHUNKS) +[0-9]+ +[0-9]+ +[0-9]+  [0-9a-f]{32}$" "$dir/out")" = 8 ]'
check "no tensors unless asked" '! says "blk.0"'
info --tensors "$pack"
check "a line for each tensor" '[ $rc -eq 0 ] && [ "$(grep -cE "^  [a-z0-9_.]+ +[A-Z0-9_]+ +[0-9x]+ +[0-9]+ bytes  (ROWS|T32 ) [A-Z]+$" "$dir/out")" = 149 ]'
check "with type, shape, layout and place" 'says "^  blk\.0\.ffn_up_exps\.weight +Q4_K +256x256x8 +294912 bytes  T32  EXPERTS$"'
info --tensors "$requantized"
check "requantized types are told from copied ones" 'says "^type +Q5_K -> Q4_K +6 tensors +1769472 bytes$" && says "^type +Q4_K +16 tensors"'
check "their errors" '[ "$(grep -cE "ffn_down_exps.* from Q[56]_K, rel. RMSE 0\.0[1-9][0-9]+$" "$dir/out")" = 8 ]'

info --json --tensors "$requantized"
check "JSON: numbers and texts" '[ $rc -eq 0 ] && [ "$(field file_bytes)" = "$(stat -c %s "$requantized")" ] && [ "$(field recipe_name)" = "\"native\"" ] && [ "$(field source_bytes)" = 13946944 ]'
check "JSON: the recipe's complete text" 'grep "\"recipe_text\"" "$dir/out" | grep -qF "rule .*ffn_down_exps.* * -> Q4_K\\n"'
check "JSON: every tensor" '[ "$(grep -c "\"unit_stride_bytes\"" "$dir/out")" = 149 ]'
check "JSON: nothing that JSON does not have" '! grep -qiE "[^a-z](nan|inf|null)[^a-z]" "$dir/out"'

# Texts from files are any bytes; JSON is UTF-8 all the same.
is_utf8() { iconv -f UTF-8 -t UTF-8 "$1" >/dev/null 2>&1 && grep -q "$(printf '\357\277\275')" "$1"; }
printf '# caf\351\nrecipe latin\nabout bytes \377\nrule .*ffn_down_exps.* * -> Q4_K\n' >"$dir/latin"
"$SPK_BIN/spk-pack" --quiet --json --recipe "$dir/latin" $model "$dir/$(printf 'caf\351').spk" >"$dir/packed" 2>"$dir/err"
check "JSON of a packing with a recipe that is no UTF-8" '[ $? -eq 0 ] && is_utf8 "$dir/packed"'
info --json "$dir/$(printf 'caf\351').spk"
check "JSON of such a pack" '[ $rc -eq 0 ] && is_utf8 "$dir/out" && [ "$(grep -c "$(printf "\357\277\275")" "$dir/out")" = 2 ]'
LC_ALL=C sed 's/blk\.1\.attn_norm/blk.1.\xe9ttn_norm/' $model >"$dir/named.gguf"
info --json --tensors "$dir/named.gguf"
check "JSON of a tensor name that is no UTF-8" '[ $rc -eq 0 ] && is_utf8 "$dir/out"'

info --verify --threads 2 "$pack"
check "verify counts bytes and chunks" '[ $rc -eq 0 ] && says "^verified 13869056 bytes in 5 chunks at [0-9.]+ GB/s$"'
info --verify --json "$pack"
check "verify in JSON" '[ $rc -eq 0 ] && [ "$(field chunks)" = 5 ] && [ "$(field bytes "$(grep -c "\"bytes\"" "$dir/out")")" = 13869056 ]'

# Flip the lowest bit of the byte at an offset.
flip() { printf "\\x$(printf %02x $(($(od -An -tu1 -j "$2" -N1 "$1") ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }
cp "$pack" "$dir/bad.spk"
flip "$dir/bad.spk" 12000000
info "$dir/bad.spk"
check "damaged weights are not seen without --verify" '[ $rc -eq 0 ]'
info --verify "$dir/bad.spk"
check "verify names chunk, offset and tensor" '[ $rc -eq 1 ] && says "R23: chunk 1 of section EXPERTS \([0-9]+ bytes at file offset [0-9]+\) .*: blk\.[0-9]\.ffn_[a-z]+_exps" && [ ! -s "$dir/out" ]'
"$SPK_BIN/spk-run" --verify --backend ref --prompt x -n 2 "$dir/bad.spk" >"$dir/out" 2>"$dir/err"
check "spk-run --verify stops before the first token, naming tensor and offset" '[ $? -eq 1 ] && [ ! -s "$dir/out" ] && says "R23: chunk 1 of section EXPERTS .* file offset [0-9]+.*: blk\.[0-9]"'
info --repair $model --verify "$dir/bad.spk"
check "repair makes the pack whole again" '[ $rc -eq 0 ] && says "^repaired   1 damaged chunks" && says "^verified" && cmp -s "$pack" "$dir/bad.spk"'
"$SPK_BIN/spk-pack" --quiet --recipe ffn --imatrix tests/models/tiny-qwen36.imatrix.gguf $model "$dir/fit.spk" >"$dir/out" 2>"$dir/err"
flip "$dir/fit.spk" 3000000
flip "$dir/fit.spk" 9000000
info --repair $model --verify "$dir/fit.spk"
check "a repair that cannot be is told in one line" '[ $rc -eq 1 ] && [ ! -s "$dir/out" ] && [ "$(wc -l <"$dir/err")" = 1 ] && says "fit.spk: .* stay damaged: .* with the imatrix or calibration tiny-qwen36.imatrix.gguf; [01] of 2 damaged chunks were repaired$"'
info --repair $model --source-weights tests/models/tiny-qwen35-q4_k_m.gguf --imatrix tests/models/tiny-qwen36.imatrix.gguf --verify "$dir/fit.spk"
check "and with it, a file that was not used besides, it is made whole" '[ $rc -eq 0 ] && says "^repaired   [12] damaged chunks" && says "^verified"'
"$SPK_BIN/spk-pack" --quiet --force --recipe native --set 'blk\.5\.ffn_down_exps.*=Q4_K' --imatrix tests/models/tiny-qwen36.imatrix.gguf $model "$dir/fit.spk" >"$dir/out" 2>"$dir/err"
"$SPK_BIN/spk-calibrate" --importance --text tests/text/held-out.txt --max-tokens 64 -o "$dir/other.gguf" tests/models/tiny-qwen3moe-q4_k_m.gguf >>"$dir/out" 2>>"$dir/err"
check "a pack with an imatrix, and statistics of another model" '[ $? -eq 0 ] && [ -s "$dir/fit.spk" ] && [ -s "$dir/other.gguf" ]'
for at in 3000000 7000000 11000000; do flip "$dir/fit.spk" $at; done
# What helps, but cannot be read: an empty file, junk, none, another kind, half of a file.
: >"$dir/empty"
printf 'hello\n' >"$dir/junk"
head -c 100000 tests/models/tiny-qwen36.imatrix.gguf >"$dir/half.gguf"
cp "$pack" "$dir/whole.spk"
cp "$dir/fit.spk" "$dir/hurt.spk"
alone=1
used=1
for helper in "--imatrix $dir/empty" "--imatrix $dir/junk" "--imatrix $dir/nowhere" "--imatrix $model" "--imatrix $dir/half.gguf" \
    "--calibration $dir/junk" "--calibration $dir/nowhere" "--calibration tests/models/tiny-qwen36.imatrix.gguf" \
    "--source-weights $dir/empty" "--source-weights $dir/nowhere" "--source-weights tests/models/tiny-qwen36.imatrix.gguf" \
    "--source-weights $dir/half.gguf"; do
    file=${helper#* }
    flip "$dir/whole.spk" 3000000
    # shellcheck disable=SC2086
    info --repair $model $helper "$dir/whole.spk"
    [ $rc -eq 0 ] && [ ! -s "$dir/err" ] && cmp -s "$pack" "$dir/whole.spk" || alone="$helper: $(cat "$dir/err")"
    case $helper in --source-weights*) continue ;; esac
    cp "$dir/hurt.spk" "$dir/fit.spk"
    # shellcheck disable=SC2086
    info --repair $model $helper "$dir/fit.spk"
    [ $rc -eq 1 ] && [ "$(wc -l <"$dir/err")" = 1 ] && says "fit.spk: .* cannot be made again, and stay damaged: $file: .*; 2 of 3 damaged chunks were repaired$" ||
        used="$helper: $(cat "$dir/err")"
done
check "a file that cannot be read stops no repair that does without ($alone)" '[ "$alone" = 1 ]'
check "and of one that needs it only that ($used)" '[ "$used" = 1 ]'
cp "$dir/hurt.spk" "$dir/fit.spk"
info --repair $model --imatrix "$dir/other.gguf" "$dir/fit.spk"
check "what needs no imatrix is repaired with a wrong one" '[ $rc -eq 1 ] && [ "$(wc -l <"$dir/err")" = 1 ] && says "fit.spk: .* stay damaged: .*, with the imatrix or calibration tiny-qwen36.imatrix.gguf; 2 of 3 damaged chunks were repaired$"'
info --repair $model --imatrix tests/models/tiny-qwen36.imatrix.gguf --verify "$dir/fit.spk"
check "and the rest with the right one" '[ $rc -eq 0 ] && says "^repaired   1 damaged chunks" && says "^verified"'
info --repair tests/models/tiny-qwen35-q4_k_m.gguf "$dir/bad.spk"
check "repair takes no other source" '[ $rc -eq 1 ] && says "was made from tiny-qwen36-ud-q4_k_m.gguf" && [ ! -s "$dir/out" ]'
cp "$pack" "$dir/bad.spk"
flip "$dir/bad.spk" 9000
info "$dir/bad.spk"
check "damaged metadata are always seen" '[ $rc -eq 1 ] && says "R12: section META"'
head -c 9000000 "$pack" >"$dir/bad.spk"
info "$dir/bad.spk"
check "a cut file is called truncated" '[ $rc -eq 1 ] && says "truncated: file has 9000000 bytes"'

info $model
check "a GGUF file" '[ $rc -eq 0 ] && says "^format +GGUF 3, alignment 32, 1 file$" && says "^model +qwen35moe" && says "^metadata +39 entries$" && says "^type +Q6_K +3 tensors +1720320 bytes$"'
info --tensors --json $model
check "a GGUF file as JSON" '[ $rc -eq 0 ] && [ "$(field format)" = "\"gguf\"" ] && [ "$(grep -c "\"dims\"" "$dir/out")" = 149 ]'
info tests/models/tiny-qwen36.imatrix.gguf
check "a GGUF file that is no model" '[ $rc -eq 0 ] && says "^model +none that spk runs: .*general.architecture"'

refuses() { check "refuses $1" "[ \$rc -eq $2 ] && says '$3' && [ ! -s \"\$dir/out\" ] && [ \"\$(wc -l <\"\$dir/err\")\" = 1 ]"; }
info --verify $model
refuses "to verify a GGUF file" 2 "--verify: .* is a GGUF file"
info tests/run.sh
refuses "other files" 1 "is not GGUF: begins with bytes 23 21 2f 75, expected 47 47 55 46; nor is it a .spk pack"
printf '<!DOCTYPE html>' >"$dir/page.gguf"
info "$dir/page.gguf"
refuses "a page, and says so" 1 "is not GGUF but HTML or XML text: .*; nor is it a .spk pack"
"$SPK_BIN/spk-unpack" "$dir/page.gguf" "$dir/none.gguf" >"$dir/out" 2>"$dir/err"; rc=$?
refuses "a page to unpack, and says so" 1 "R1: not a .spk pack, but HTML or XML text"
"$SPK_BIN/spk-run" --prompt a "$dir/page.gguf" >"$dir/out" 2>"$dir/err"; rc=$?
refuses "a page to run, and says so" 1 "R1: not a .spk pack, but HTML or XML text"
info "$dir"
refuses "a directory" 1 "directory"
info "$dir/nowhere.spk"
refuses "a missing file" 1 "nowhere.spk: No such file"
info
refuses "no file" 2 "expected one FILE, found 0"
info "$pack" $model
refuses "two files" 2 "expected one FILE, found 2"
info --threads 0 "$pack"
refuses "no threads" 2 "--threads .0.: expected a whole number from 1"
info --threads
refuses "a missing value" 2 "--threads needs a value"
info --json=yes "$pack"
refuses "a value for a flag" 2 "--json takes no value"
info --nonsense "$pack"
refuses "an unknown option" 2 "unknown option .--nonsense"
info -x "$pack"
refuses "an unknown letter" 2 "unknown option .-x"
info --help
check "help names every option" '[ $rc -eq 0 ] && for o in tensors verify threads repair imatrix calibration source-weights json help version; do says "--$o" || false; done && [ "$(head -n 1 "$dir/out")" = "usage: spk-info [options] FILE" ]'
info --version
check "version" '[ $rc -eq 0 ] && says "^spk-info [0-9.]+, reads .spk 1\.0$"'
"$SPK_BIN/spk-info" "$pack" >/dev/full 2>"$dir/err"
check "a full disk is an error" '[ $? -eq 1 ] && grep -q "writing the output" "$dir/err"'
exit $status
