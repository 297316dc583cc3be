#!/usr/bin/env bash
# spk-pack with a budget, from outside: what spk-compare measures on the pack is what was promised, the recipe makes the same
# pack again, and what cannot be is refused.
set -u
: "${SPK_BIN:=build/bin}"
# shellcheck source=tests/check.sh
. "$(dirname "$0")/check.sh"
dense=tests/models/tiny-qwen35-q4_k_m.gguf
text=tests/text/held-out.txt
bf16=build/models/tiny-qwen36-bf16.gguf
: >"$dir/out"; : >"$dir/err"

pack() { "$SPK_BIN/spk-pack" "$@" >"$dir/out" 2>"$dir/err" </dev/null; rc=$?; }
# figure KEY [FILE]: the first value of KEY in the report.
figure() { sed -n "s/^[[:space:]]*\"$1\":[[:space:]]*\([^,]*\),\{0,1\}$/\1/p" "${2:-$dir/out}" | sed -n 1p; }
holds() { awk "BEGIN { exit !($1) }"; }
says() { grep -qF -- "$1" "$dir/out" "$dir/err"; }
# measured BASE PACK ARGUMENTS...: mean KL by spk-compare.
measured() {
    "$SPK_BIN/spk-compare" --backend cpu --text $text "${@:3}" --force --json "$dir/compare" "$1" "$2" >/dev/null 2>"$dir/err" ||
        "$SPK_BIN/spk-compare" --backend ref --text $text "${@:3}" --force --json "$dir/compare" "$1" "$2" >/dev/null 2>"$dir/err"
    figure kl_mean "$dir/compare"
}
refused() { [ $rc -eq "$1" ] && [ ! -s "$dir/out" ] && [ "$(grep -c . "$dir/err")" -le 2 ] && says "$2" && [ ! -e "$dir/no.spk" ]; }
size_of() { stat -c %s "$1"; }
short="--ctx 60 --max-tokens 257"                  # 256 positions in 5 windows

# ---- A dense model, which has few choices ----
# shellcheck disable=SC2086
pack --json --max-kl 1000 --text $text $short $dense "$dir/all.spk"
check "a budget that nothing exceeds takes the smallest of everything" \
    '[ $rc -eq 0 ] && ! grep -q "\"becomes\":[[:space:]]*null" "$dir/out" && [ "$(figure token_bytes_after)" -lt "$(figure token_bytes_before)" ]'
kl_all=$(figure kl_mean) least=$(figure token_bytes_after) most=$(figure token_bytes_before) size_all=$(size_of "$dir/all.spk")
half=$(awk "BEGIN { print $kl_all / 2 }")

# shellcheck disable=SC2086
pack --json --max-kl "$half" --text $text $short --threads 2 --write-recipe "$dir/half.recipe" $dense "$dir/half.spk"
cp "$dir/out" "$dir/half.json"
check "half of that is held, and used" \
    '[ $rc -eq 0 ] && holds "$(figure kl_mean) <= $half && $(figure kl_mean) > 0.1 * $half" && [ "$(figure token_bytes_after)" -lt "$most" ] &&
     [ "$(figure token_bytes_after)" -gt "$least" ]'
# shellcheck disable=SC2086
check "spk-compare measures on the pack what was promised, to the last digit" \
    '[ "$(measured $dense "$dir/half.spk" $short)" = "$(figure kl_mean "$dir/half.json")" ]'
pack --recipe "$dir/half.recipe" $dense "$dir/again.spk"
check "the recipe makes the same pack" '[ $rc -eq 0 ] && cmp -s "$dir/half.spk" "$dir/again.spk"'
# shellcheck disable=SC2086
pack --json --max-kl "$half" --text $text $short --threads 1 --write-recipe "$dir/one.recipe" $dense "$dir/one.spk"
check "threads change neither the choice nor the pack" \
    '[ $rc -eq 0 ] && cmp -s "$dir/half.spk" "$dir/one.spk" && cmp -s "$dir/half.recipe" "$dir/one.recipe"'

# shellcheck disable=SC2086
pack --json --dry-run --max-kl "$half" --text $text $short --write-recipe "$dir/dry.recipe" $dense
check "a dry run chooses the same and packs nothing" \
    '[ $rc -eq 0 ] && cmp -s "$dir/half.recipe" "$dir/dry.recipe" && ! ls "$dir"/dry* | grep -q spk'
# shellcheck disable=SC2086
pack --quiet --dry-run --max-kl 0 --text $text $short $dense
check "no KL at all: everything stays" '[ $rc -eq 0 ] && ! says "rule " && says "mean KL 0 +- 0 " && says "per token" && says "+0.0 %"'
check "--quiet is quiet" '[ ! -s "$dir/err" ]'
# shellcheck disable=SC2086
pack --max-kl "$half" --text $text $short --force $dense "$dir/half.spk"
check "the table says what each choice costs, and the time that it takes is told" \
    '[ $rc -eq 0 ] && grep -qE "^  ffn down +[0-9-]+ +Q6_K .*[0-9]e-0[0-9]\* +[0-9]+$" "$dir/out" && says "together   mean KL" &&
     [ "$(wc -l <"$dir/err")" = 1 ] && grep -qE "measuring [0-9]+ choices on 256 positions, and some [0-9]+ sets on 256: about [0-9]+ s$" "$dir/err"'

# ---- Bytes ----
middle=$(((least + most) / 2))
# shellcheck disable=SC2086
pack --json --max-bytes-per-token $middle --text $text $short $dense "$dir/bytes.spk"
check "bytes a token are held, at less KL than the smallest has" \
    '[ $rc -eq 0 ] && [ "$(figure token_bytes_after)" -le $middle ] && holds "$(figure kl_mean) < $kl_all"'
middle=$(((size_all + $(size_of $dense)) / 2))
# shellcheck disable=SC2086
pack --json --max-size $middle --text $text $short $dense "$dir/size.spk"
check "the size of the pack is held, at less KL than the smallest has" \
    '[ $rc -eq 0 ] && [ "$(size_of "$dir/size.spk")" -le $middle ] && holds "$(figure kl_mean) < $kl_all"'
# shellcheck disable=SC2086
pack --max-bytes-per-token 1000 --text $text $short $dense "$dir/no.spk"
check "too few bytes a token: the fewest are named" 'refused 1 "the fewest that can be reached are $least"'
# shellcheck disable=SC2086
pack --max-size 1000 --text $text $short $dense "$dir/no.spk"
check "too small a pack: the smallest is named" 'refused 1 "the smallest pack that can be reached takes"'
# shellcheck disable=SC2086
pack --quiet --max-kl 1e-9 --max-bytes-per-token "$least" --text $text $short $dense "$dir/no.spk"
check "two limits that exclude each other: the nearest is named" "refused 1 'with a mean KL of at most 1e-09 are $most'"

# ---- The named recipes; what ffn leaves alone is pinned, but for the head and the embedding ----
tiny="--ctx 64 --max-tokens 257"                   # 256 positions
mixers=(--set 'blk\.\d+\.(attn_(q|k|v|output|qkv|gate)|ssm_out)\.weight=Q8_0')
"$SPK_BIN/spk-pack" --quiet --recipe ffn $model "$dir/ffn.spk" >"$dir/out" 2>"$dir/err"
# shellcheck disable=SC2086
kl_ffn=$(measured $model "$dir/ffn.spk" $tiny)
# shellcheck disable=SC2086
pack --json --max-kl "$kl_ffn" --text $text $tiny --effort fast "${mixers[@]}" --write-recipe "$dir/tiny.recipe" $model "$dir/tiny.spk"
check "at the KL of ffn no more is read than by ffn" \
    '[ $rc -eq 0 ] && [ "$(figure token_bytes_after)" -le 5935056 ] && holds "$(figure kl_mean) <= $kl_ffn"'
cp "$dir/out" "$dir/tiny.json"
# shellcheck disable=SC2086
check "and spk-compare agrees" '[ "$(measured $model "$dir/tiny.spk" $tiny)" = "$(figure kl_mean "$dir/tiny.json")" ]'
pack --effort fast --recipe "$dir/tiny.recipe" $model "$dir/again.spk" --force
check "the recipe makes the same pack, too" '[ $rc -eq 0 ] && cmp -s "$dir/tiny.spk" "$dir/again.spk"'

# ---- Locked while it searches; what is tried is what was opened ----
# The text comes through a pipe, so that a search waits until the test has done what it does meanwhile.
mkfifo "$dir/piped"
# searching OUT OPTION...: a search in the background, $out_pid, which has opened everything else, and reads descriptor 3.
searching() {
    local to=$1
    shift
    # shellcheck disable=SC2086
    "$SPK_BIN/spk-pack" --quiet --max-kl "$half" --text "$dir/piped" $short "$@" "$dir/model.gguf" "$to" >"$dir/first" 2>&1 </dev/null &
    out_pid=$!
    exec 3>"$dir/piped"
}
go_on() { cat $text >&3; exec 3>&-; wait $out_pid; }
cp $dense "$dir/model.gguf"
searching "$dir/locked.spk"
pack --quiet --recipe native $dense "$dir/locked.spk"
check "a pack is locked while its budget is searched" 'refused 1 "locked.spk: is being written already"'
# shellcheck disable=SC2086
pack --quiet --force --max-kl "$half" --text $text $short $dense "$dir/locked.spk"
check "and a second search is refused before it begins" 'refused 1 "locked.spk: is being written already"'
pack --dry-run --recipe native $dense "$dir/locked.spk"
check "a dry run needs no lock" '[ $rc -eq 0 ]'
cp packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf "$dir/other.gguf" && mv "$dir/other.gguf" "$dir/model.gguf"
go_on
check "a source that is exchanged meanwhile: what was opened is tried and packed" \
    '[ $? -eq 0 ] && "$SPK_BIN/spk-unpack" --quiet "$dir/locked.spk" "$dir/back.gguf" >"$dir/out" 2>"$dir/err" &&
     "$SPK_BIN/spk-info" "$dir/back.gguf" 2>"$dir/err" | grep -q qwen35'
cp $dense "$dir/model.gguf"
searching "$dir/model.spk" --dry-run
touch "$dir/model.gguf"
go_on
check "one that is changed is refused, by a dry run too" '[ $? -eq 1 ] && grep -q "model.gguf: was changed while it was read" "$dir/first"'
echo keep >"$dir/old.spk"
# shellcheck disable=SC2086
pack --max-kl "$half" --text "$dir/nothing" $short $dense "$dir/old.spk"
check "a pack that is there is not replaced without --force, found before the search" \
    '[ $rc -eq 1 ] && says "old.spk: exists already" && [ "$(cat "$dir/old.spk")" = keep ]'
searching "$dir/old.spk" --force
kill -TERM $out_pid
exec 3>&-
wait $out_pid
check "a search that is ended leaves what was there" '[ $? -eq 143 ] && [ "$(cat "$dir/old.spk")" = keep ] && ! find "$dir" -name ".*" -type f | grep -q .'

# ---- With what fits weights better ----
pins=("${mixers[@]}" --set 'blk\.\d+\.ffn_(gate|up|down)_shexp\.weight=Q8_0' --set 'token_embd\.weight=Q8_0')
# shellcheck disable=SC2086
pack --json --max-kl 0.003 --text $text $tiny --imatrix tests/models/tiny-qwen36.imatrix.gguf "${pins[@]}" \
    --write-recipe "$dir/imatrix.recipe" $model "$dir/imatrix.spk"
cp "$dir/out" "$dir/imatrix.json"
# shellcheck disable=SC2086
check "--imatrix: the KL is that of the pack made with it" \
    '[ $rc -eq 0 ] && [ "$(measured $model "$dir/imatrix.spk" $tiny)" = "$(figure kl_mean "$dir/imatrix.json")" ] &&
     holds "$(figure kl_mean "$dir/imatrix.json") > 0"'
pack --imatrix tests/models/tiny-qwen36.imatrix.gguf --recipe "$dir/imatrix.recipe" --force $model "$dir/again.spk"
check "--set and --imatrix are in what the recipe makes" '[ $rc -eq 0 ] && cmp -s "$dir/imatrix.spk" "$dir/again.spk"'
check "--set is in the recipe, before all rules" 'sed -n 2p "$dir/imatrix.recipe" | grep -q "^rule .*token_embd.* -> Q8_0$"'
if [ -e "$bf16" ]; then
    # shellcheck disable=SC2086
    pack --json --max-kl 0.003 --text $text $tiny --source-weights "$bf16" "${pins[@]}" --write-recipe "$dir/better.recipe" \
        $model "$dir/better.spk"
    cp "$dir/out" "$dir/better.json"
    # shellcheck disable=SC2086
    check "--source-weights: the KL is that of the pack fitted from it" \
        '[ $rc -eq 0 ] && [ "$(measured $model "$dir/better.spk" $tiny)" = "$(figure kl_mean "$dir/better.json")" ] &&
         grep -q "\"source_weights\":" "$dir/better.json"'
    pack --source-weights "$bf16" --recipe "$dir/better.recipe" --force $model "$dir/again.spk"
    check "and its recipe makes it again" '[ $rc -eq 0 ] && cmp -s "$dir/better.spk" "$dir/again.spk"'
else
    echo "SKIP --source-weights: $bf16 is not there"
fi

# ---- Refusals ----
pack --max-kl 0.004 $dense "$dir/no.spk"
check "a budget without a text" 'refused 2 "expected --text FILE"'
pack --text $text $dense "$dir/no.spk"
check "a text without a budget" 'refused 2 "--text, --ctx and --max-tokens are of a budget"'
pack --max-kl 0.004 --text $text --recipe ffn $dense "$dir/no.spk"
check "a budget and a recipe" 'refused 2 "--recipe ffn: a budget chooses the recipe"'
pack --max-kl -1 --text $text $dense "$dir/no.spk"
check "a KL below zero" 'refused 2 "--max-kl"'
pack --max-size 20GB --text $text $dense "$dir/no.spk"
check "bytes with a unit" "refused 2 \"--max-size '20GB'\""
pack --max-kl 0.004 --text $text --max-tokens 200 $dense "$dir/no.spk"
check "too short a text" 'refused 1 "$text: 200 tokens; expected 257"'
pack --max-kl 0.004 --text $text --ctx 100000 $dense "$dir/no.spk"
check "a window beyond what the model was trained on" 'refused 2 "--ctx 100000: $dense was trained on"'
pack --max-kl 0.004 --text "$dir/nothing" $dense "$dir/no.spk"
check "a text that is not there" 'refused 1 "$dir/nothing"'
cp $text "$dir/text"
pack --max-kl 0.004 --text "$dir/text" --write-recipe "$dir/text" $dense "$dir/no.spk"
check "a recipe over the text" 'refused 1 "--write-recipe $dir/text: that is the input" && cmp -s $text "$dir/text"'
pack --max-kl 0.004 --text $text --write-recipe "$dir/no.spk" $dense "$dir/no.spk"
check "a recipe over the pack" 'refused 1 "that is the pack"'
echo keep >"$dir/kept.recipe"
pack --max-kl 0.004 --text "$dir/nothing" --write-recipe "$dir/kept.recipe" $dense "$dir/no.spk"
check "a recipe that is there, before any work" 'refused 1 "kept.recipe: exists already" && [ "$(cat "$dir/kept.recipe")" = keep ]'
ln "$dir/kept.recipe" "$dir/linked"
pack --recipe native --force --write-recipe "$dir/kept.recipe" --report "$dir/linked" $dense "$dir/no.spk"
check "a recipe over the page" 'refused 1 "--report $dir/linked: that is the recipe" && [ "$(cat "$dir/kept.recipe")" = keep ]'
pack --recipe native --write-recipe "$dir/same" --report "$dir/same" $dense "$dir/no.spk"
check "which are to be the same file" 'refused 1 "$dir/same: that is the recipe" && [ ! -e "$dir/same" ]'
cp packs/qwen3.6-35b-a3b/ffn.recipe "$dir/kept.recipe"
pack --recipe "$dir/kept.recipe" --force --write-recipe "$dir/kept.recipe" $model "$dir/no.spk"
check "a recipe over the one that is read" 'refused 1 "--write-recipe $dir/kept.recipe: that is the input"'
cp "$dir/text" "$dir/out.spk"
pack --max-kl 0.004 --text "$dir/out.spk" --force $dense "$dir/out.spk"
check "a pack over the text" '[ $rc -eq 1 ] && says "OUT.spk $dir/out.spk: that is the input" && cmp -s $text "$dir/out.spk"'
# shellcheck disable=SC2086
pack --quiet --max-kl 1e-9 --text $text $tiny "${pins[@]}" --set 'token_embd.*=Q4_K' --write-recipe "$dir/no.recipe" $model "$dir/no.spk"
check "--set alone costs more" 'refused 1 "what --set requantizes alone has a mean KL of 0.0" && [ ! -e "$dir/no.recipe" ]'
echo old >"$dir/ffn.recipe"
pack --write-recipe "$dir/ffn.recipe" --recipe ffn --force $model "$dir/ffn.spk"
check "--write-recipe without a budget" '[ $rc -eq 0 ] && cmp -s "$dir/ffn.recipe" packs/qwen3.6-35b-a3b/ffn.recipe'
check "nothing is left behind" '! find "$dir" -name ".*" -type f | grep -q .'
exit $status
