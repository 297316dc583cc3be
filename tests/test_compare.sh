#!/usr/bin/env bash
# spk-compare from outside: figures that are known without knowing the model, gates that can fail, and refusals.
set -u
status=0
ok() { echo "ok $1"; }
bad() { echo "FAIL $1"; status=1; }
check() { if eval "$2"; then ok "$1"; else bad "$1: $2"; sed 's/^/  /' "$dir/out" "$dir/err" | head -n 20; fi; }

base=build/models/tiny-qwen36-bf16.gguf
model=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
other_vocabulary=tests/models/tiny-qwen35-q4_k_m.gguf
text=tests/text/held-out.txt
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
: >"$dir/out"; : >"$dir/err"

compare() { "$SPK_BIN/spk-compare" "$@" >"$dir/out" 2>"$dir/err"; rc=$?; }
# field KEY [N]: value of the N-th KEY in the report.
field() { sed -n "s/^[[:space:]]*\"$1\":[[:space:]]*\([^,]*\),\{0,1\}$/\1/p" "$dir/report" | sed -n "${2:-1}p"; }
holds() { awk "BEGIN { exit !($1) }"; }
says() { grep -qF -- "$1" "$dir/out" "$dir/err"; }
one_line() { [ "$(wc -l <"$dir/err")" = 1 ]; }
no_leftovers() { [ -z "$(find "$dir" -mindepth 1 \( -name '.*' -o -name '*.tmp-*' \))" ]; }
# patch FILE OFFSET HEX...: bytes over those at the offset.
patch() { printf "$(printf '\\x%s' "${@:3}")" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }
# offset_of FILE TEXT: of the byte after its first appearance.
offset_of() { echo $(($(LC_ALL=C grep -abo -m1 -F "$2" "$1" | head -n 1 | cut -d: -f1) + ${#2})); }

# ---- A model against itself ----
compare --text $text --max-tokens 100 --max-kl 0 --min-top1 1 --force --json "$dir/report" $model $model
check "a model equals itself" '[ $rc -eq 0 ] && [ "$(field kl_mean)" = 0 ] && [ "$(field kl_max)" = 0 ] && [ "$(field top1)" = 1 ]'
check "all positions but the last are scored" '[ "$(field positions)" = 99 ] && [ "$(field tokens)" = 100 ]'
check "one window has no error between windows" '[ -z "$(field kl_window_se)" ]'

# ---- Quantized weights against their original ----
compare --text $text --ctx 64 --max-tokens 129 --force --json "$dir/report" $base $model $base $model
check "quantized weights differ, a little" '[ $rc -eq 0 ] && holds "$(field kl_mean) > 1e-4 && $(field kl_mean) < 0.05 && $(field top1) > 0.8"'
check "figures are in order" 'holds "$(field kl_median) < $(field kl_p90) && $(field kl_p90) < $(field kl_p99) && $(field kl_p99) <= $(field kl_max)"'
check "perplexities and their ratio agree" 'holds "(log($(field ppl_candidate) / $(field ppl_base)) - $(field ln_ppl_ratio)) ^ 2 < 1e-16"'
check "differences to the first candidate are paired" \
    'holds "$(field kl_diff_to_first 2) + $(field kl_mean) == 0 && $(field kl_diff_se 2) == $(field kl_se)" && [ "$(field kl_diff_to_first 3)" = 0 ]'
check "no number is missing or beyond JSON" '! grep -qiE "null|nan|inf" "$dir/report"'
cp "$dir/report" "$dir/first"
compare --text $text --ctx 64 --max-tokens 129 --threads 1 --force --json "$dir/report" $base $model $base $model
check "threads change nothing" 'cmp -s "$dir/first" "$dir/report"'

compare --text $text --max-tokens 100 --base-backend ref --backend cpu --force --json "$dir/report" $model $model
check "a backend against another one differs, a little" \
    '[ $rc -eq 0 ] && holds "$(field kl_mean) > 0 && $(field kl_mean) < 0.01" && says "ref backend)" && ! [ "$(field backend)" = "$(field backend 2)" ]'

# ---- Windows and token lists ----
"$SPK_BIN/spk-run" --tokenize --prompt-file $text $model 2>"$dir/err" | tr ' ' '\n' | head -n 129 >"$dir/tokens"
compare --tokens "$dir/tokens" --ctx 64 --force --json "$dir/report" $base $model $base $model
check "a token list gives what its text gives" '[ $rc -eq 0 ] && [ "$(grep -v "\"text\"" "$dir/first")" = "$(grep -v "\"text\"" "$dir/report")" ]'
{ head -n 40 "$dir/tokens"; head -n 40 "$dir/tokens"; head -n 1 "$dir/tokens"; } | tr '\n' ',' >"$dir/twice"
compare --tokens "$dir/twice" --ctx 40 --force --json "$dir/report" $base $model
check "each window begins from an empty state" '[ $rc -eq 0 ] && [ "$(field windows)" = 2 ] && holds "$(field kl_window_se) < 1e-12 && $(field kl_se) > 1e-6"'

# ---- Gates ----
compare --text $text --max-tokens 100 --max-kl 0.5 --min-top1 0.5 $base $model
check "gates that hold exit 0" '[ $rc -eq 0 ] && says "passed --max-kl" && says "passed --min-top1"'
compare --text $text --max-tokens 100 --max-kl 0.00001 $base $model
check "a KL gate fails and says by how much" '[ $rc -eq 1 ] && says "FAILED --max-kl 1e-05: $model" && says "off by"'
compare --text $text --max-tokens 300 --min-top1 0.9999 $base $model
check "a top-1 gate fails and says by how much" '[ $rc -eq 1 ] && says "FAILED --min-top1 0.9999: $model" && says "off by"'
compare --text $text --max-tokens 100 --max-kl 0.00001 $base $base $model
check "one failing candidate is enough" '[ $rc -eq 1 ] && says "passed --max-kl" && says "FAILED --max-kl"'
compare --text $text --max-tokens 100 --min-top1 0.97 --force --json "$dir/report" $model $model
check "99 of 99 are above 0.97" '[ $rc -eq 0 ] && says "same top-1, lower bound = 0.97339" && holds "$(field top1_lower) > 0.97338 && $(field top1_lower) < 0.9734"'
compare --text $text --max-tokens 100 --min-top1 0.98 $model $model
check "but too few for 0.98" '[ $rc -eq 1 ] && says "FAILED --min-top1 0.98" && says "off by"'
compare --text $text --max-tokens 100 --min-top1 1 $model $model
check "1 asks for every position" '[ $rc -eq 0 ] && says "passed --min-top1 1: $model: same top-1 = 1"'
compare --text $text --max-tokens 300 --min-top1 1 $base $model
check "and one that differs is too many" '[ $rc -eq 1 ] && says "FAILED --min-top1 1"'
compare --text $text --ctx 64 --max-tokens 257 --max-kl 1 --force --json "$dir/report" $base $model
check "the KL bound takes the larger error" \
    'holds "($(field kl_mean) + 1.645 * ($(field kl_se) > $(field kl_window_se) ? $(field kl_se) : $(field kl_window_se)) - $(field kl_upper)) ^ 2 < 1e-24" && says "= $(printf %.5g "$(field kl_upper)")"'

# ---- The window ----
cp $model "$dir/short.gguf"
patch "$dir/short.gguf" $(($(offset_of "$dir/short.gguf" qwen35moe.context_length) + 4)) 30 00 00 00
compare --text $text --max-tokens 100 --force --json "$dir/report" $model "$dir/short.gguf"
check "a window is no longer than a model was trained on" '[ $rc -eq 0 ] && [ "$(field ctx)" = 48 ] && [ "$(field windows)" = 3 ] && says "in 3 windows of 48"'
compare --text $text --max-tokens 700 --force --json "$dir/report" $model $model
check "nor than 512" '[ $rc -eq 0 ] && [ "$(field ctx)" = 512 ]'

# ---- The report: begun before the work, and never in the place of an input ----
compare --text $text --json "$dir/nowhere/report" "$dir/no.gguf" "$dir/no.gguf"
check "a report that cannot be written is found before anything else" '[ $rc -eq 1 ] && one_line && says "nowhere/report" && [ ! -s "$dir/out" ]'
(ulimit -f 0; "$SPK_BIN/spk-compare" --text $text --max-tokens 50 --max-kl 0 --json "$dir/lost" $model $model 2>&1; echo "rc $?") |
    cat >"$dir/out"
check "gates are printed whatever becomes of the report" 'says "passed --max-kl 0" && says "lost" && says "rc 1" && [ ! -e "$dir/lost" ] && no_leftovers'
echo keep >"$dir/report"
compare --text $text --force --json "$dir/report" $model "$dir/no.gguf"
check "a failure leaves an old report" '[ $rc -eq 1 ] && one_line && [ "$(cat "$dir/report")" = keep ] && no_leftovers'
compare --text $text --json "$dir/report" "$dir/no.gguf" "$dir/no.gguf"
check "which is not replaced without --force, before anything else" '[ $rc -eq 1 ] && one_line && says "report: exists already" && [ "$(cat "$dir/report")" = keep ]'
cp $text "$dir/text"
compare --text "$dir/text" --json "$dir/text" $model $model
check "the text is not replaced" '[ $rc -eq 1 ] && one_line && says "that is the input" && cmp -s $text "$dir/text"'
cp "$dir/tokens" "$dir/ids"
compare --tokens "$dir/ids" --json "$dir/ids" $model $model
check "nor are the ids" '[ $rc -eq 1 ] && one_line && cmp -s "$dir/tokens" "$dir/ids"'
compare --tokens "$dir/ids" --json "$dir/$(printf 'caf\351')" $model "$dir/../$(basename "$dir")/short.gguf"
check "a path that is no UTF-8 is a path" '[ $rc -eq 0 ]'
mv "$dir/ids" "$dir/$(printf 'caf\351')"
compare --tokens "$dir/$(printf 'caf\351')" --force --json "$dir/report" $model $model
check "and JSON all the same" '[ $rc -eq 0 ] && iconv -f UTF-8 -t UTF-8 "$dir/report" >/dev/null && grep -qF "$(printf "caf\357\277\275")" "$dir/report"'

# ---- Refusals ----
refuses() { check "refuses $1" "[ \$rc -eq $2 ] && one_line && says \"$3\""; }
compare --text $text $model $other_vocabulary
refuses "another vocabulary" 1 "vocabulary of 2048 tokens"
compare --text $text $model
refuses "a base without candidates" 2 "expected BASE"
compare $model $model
refuses "no text" 2 "--text and --tokens"
compare --text $text --tokens "$dir/tokens" $model $model
refuses "two texts" 2 "--text and --tokens"
compare --text $text --ctx 0 $model $model
refuses "an empty window" 2 "--ctx"
compare --text $text --ctx 1000000 $model $model
refuses "a window beyond the trained context" 2 "--ctx 1000000"
compare --text $text --min-top1 1.5 $model $model
refuses "a share above 1" 2 "--min-top1"
compare --text $text --backend abacus $model $model
refuses "an unknown backend" 2 "abacus"
echo "1 2 three 4" >"$dir/bad"
compare --tokens "$dir/bad" $model $model
refuses "a word among token ids" 1 "entry 2"
echo "1, 2, 3, 4096" >"$dir/bad"
compare --tokens "$dir/bad" $model $model
refuses "an id beyond the vocabulary" 1 "entry 3"
echo "1 2" >"$dir/bad"
compare --tokens "$dir/bad" $model $model
refuses "a text too short" 1 "2 tokens; expected 3"
cp $model "$dir/model.gguf"
compare --text $text --max-tokens 10 --json "$dir/model.gguf" $model "$dir/model.gguf"
refuses "to replace a model by its report" 1 "that is the input"
check "and left the model alone" 'cmp -s $model "$dir/model.gguf"'
compare --text "$dir/nowhere.txt" $model $model
refuses "a missing text" 1 "nowhere.txt"
compare --nonsense $model $model
refuses "an unknown option" 2 "unknown option '--nonsense'"
compare --threads 1025 --text $text $model $model
refuses "too many threads" 2 "--threads '1025': expected a whole number from 1 to 1024"
compare --max-kl nan --text $text $model $model
refuses "a limit that is no number" 2 "--max-kl 'nan'"

# ---- A damaged block must not pass for an accurate one ----
"$SPK_BIN/spk-pack" --quiet --recipe native $model "$dir/pack.spk" >"$dir/out" 2>"$dir/err"
compare --text $text --max-tokens 400 --max-kl 0.01 --min-top1 0.9 $model "$dir/pack.spk"
check "an undamaged pack passes the gates" '[ $rc -eq 0 ]'
# The first tile of STATIC is 32 blocks of blk.0.attn_qkv in Q8_0; its first plane holds their scales.
static=$("$SPK_BIN/spk-info" "$dir/pack.spk" | awk '$1 == "STATIC" { print $2 }')
head -c 512 /dev/zero | tr '\0' '\74' | dd of="$dir/pack.spk" bs=1 seek=$((static + 1024)) conv=notrunc status=none
compare --text $text --max-tokens 400 --max-kl 0.01 $model "$dir/pack.spk"
check "a damaged block fails the KL gate" '[ $rc -eq 1 ] && says "FAILED --max-kl 0.01"'
compare --text $text --max-tokens 400 --min-top1 0.9 $model "$dir/pack.spk"
check "and the top-1 gate" '[ $rc -eq 1 ] && says "FAILED --min-top1 0.9"'

# ---- Equal ids must mean equal texts ----
for list in tokens merges; do
    cp $model "$dir/other.gguf"
    # Behind the key: value type, element type, count and the length of the first string.
    patch "$dir/other.gguf" $(($(offset_of "$dir/other.gguf" tokenizer.ggml.$list) + 4 + 4 + 8 + 8)) 7e
    compare --text $text --max-tokens 50 $model "$dir/other.gguf"
    refuses "other $list" 1 "other.gguf: another tokenizer than that of $model: entry 0 of tokenizer.ggml.$list differs"
    compare --tokens "$dir/tokens" --max-tokens 50 $model "$dir/other.gguf"
    check "but ids are compared as they are, with other $list" '[ $rc -eq 0 ]'
done
exit $status
