#!/usr/bin/env bash
# spk-run from outside: what it prints, what it writes and what it never touches, and how it fails.
set -u
. tests/check.sh

run() { "$SPK_BIN/spk-run" "$@" >"$dir/out" 2>"$dir/err" </dev/null; rc=$?; }
says() { grep -qF -- "$1" "$dir/out" "$dir/err"; }
one_line() { [ "$(wc -l <"$dir/err")" = 1 ]; }
# field KEY FILE: a number of a JSON object on one line, or one with a key on each line.
field() { grep -oE "\"$1\":[[:space:]]*[-0-9.e+]+" "$2" | sed 's/.*:[[:space:]]*//'; }
no_leftovers() { [ -z "$(find "$dir" -mindepth 1 \( -name '.*' -o -name '*.tmp-*' \))" ]; }
# patch FILE OFFSET HEX...: bytes over those at the offset.
patch() { printf "$(printf '\\x%s' "${@:3}")" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }
# offset_of FILE TEXT: of the byte after its first appearance.
offset_of() { echo $(($(LC_ALL=C grep -abo -m1 -F "$2" "$1" | head -n 1 | cut -d: -f1) + ${#2})); }

# ---- Text, ids, JSON ----
run --prompt 'In the beginning God created' -n 8 $model
check "text goes to stdout, rates to stderr" '[ $rc -eq 0 ] && grep -q "[a-z]" "$dir/out" && one_line && says "generated 8 at"'
cp "$dir/out" "$dir/text"
run --prompt 'In the beginning God created' -n 8 --threads 1 $model
check "threads change nothing" 'cmp -s "$dir/text" "$dir/out"'
run --prompt 'In the beginning God created' -n 8 --json $model
check "the same as JSON" '[ $rc -eq 0 ] && grep -q "\"pack\":false" "$dir/out" && [ "$(field state_bytes "$dir/out")" -gt 0 ] && [ "$(wc -l <"$dir/out")" = 1 ]'
check "the JSON has the text" 'grep -qF "\"text\":\"$(cat "$dir/text")\"" "$dir/out"'
cp $model "$dir/$(printf 'caf\351').gguf"
run --prompt a -n 1 --json "$dir/$(printf 'caf\351').gguf"
check "a path that is no UTF-8 gives valid JSON" '[ $rc -eq 0 ] && iconv -f UTF-8 -t UTF-8 "$dir/out" >/dev/null && says "$(printf "caf\357\277\275.gguf")"'
run --prompt 'In the beginning' --tokenize $model
cp "$dir/out" "$dir/ids"
run --tokens "$dir/ids" -n 4 $model
cp "$dir/out" "$dir/text"
run --prompt 'In the beginning' -n 4 $model
check "ids and their text give the same" '[ $rc -eq 0 ] && cmp -s "$dir/text" "$dir/out"'

# ---- Sampling ----
sample=(--prompt 'In the beginning' -n 12 --temp 1.2 --top-k 50 --top-p 0.95 --min-p 0.01)
run "${sample[@]}" --seed 5 $model
cp "$dir/out" "$dir/text"
run "${sample[@]}" --seed 5 --threads 1 $model
check "a seed repeats" '[ $rc -eq 0 ] && cmp -s "$dir/text" "$dir/out"'
run "${sample[@]}" --seed 6 $model
check "another seed gives another text" '[ $rc -eq 0 ] && ! cmp -s "$dir/text" "$dir/out"'
run --prompt 'In the beginning' -n 12 $model
cp "$dir/out" "$dir/text"
run --prompt 'In the beginning' -n 12 --temp 3 --top-k 1 --seed 9 $model
check "the best of one is the best" '[ $rc -eq 0 ] && cmp -s "$dir/text" "$dir/out"'
run --prompt 'In the beginning' -n 12 --fuse router,shexp --no-fuse gdn-core $model
check "GPU switches change no text, or are refused without a GPU" \
    'if [ $rc -eq 0 ]; then cmp -s "$dir/text" "$dir/out"; else [ $rc -eq 1 ] && grep -q "only the cuda backend has any" "$dir/err"; fi'

# ---- Context: the last token is not evaluated ----
printf '17' >"$dir/one"
run --tokens "$dir/one" --context 2 -n 2 $model
check "one token and two generated fit in a context of 2" '[ $rc -eq 0 ] && says "generated 2"'
run --tokens "$dir/one" --context 1 -n 0 $model
check "nothing generated needs the prompt only" '[ $rc -eq 0 ] && says "generated 0"'
run --tokens "$dir/one" --context 2 -n 3 $model
check "but not three" '[ $rc -eq 1 ] && one_line && says "--context 2: a prompt of 1 tokens and -n 3 need 3"'
run --prompt a -n 99999999 $model
check "too large a number names its option" '[ $rc -eq 2 ] && one_line && says "-n '\''99999999'\''"'
run --prompt 'hello world' -n 16777216 $model
check "and so does too large a sum" '[ $rc -eq 1 ] && one_line && says "-n 16777216 need a context of"'
check "no warning within the trained context" '! says warning'
cp $model "$dir/short.gguf"
patch "$dir/short.gguf" $(($(offset_of "$dir/short.gguf" qwen35moe.context_length) + 4)) 06 00 00 00
run --tokens "$dir/one" -n 6 "$dir/short.gguf"
check "as long as the model was trained is no warning" '[ $rc -eq 0 ] && ! says warning'
run --tokens "$dir/one" -n 7 "$dir/short.gguf"
check "longer is a warning, once" '[ $rc -eq 0 ] && [ "$(grep -c "warning: prompt and generation may take 7 tokens; the model was trained on 6$" "$dir/err")" = 1 ] && says "generated 7"'

# ---- Logits: the file appears whole or not at all, and never in the place of an input ----
run --tokens "$dir/ids" --logits "$dir/logits" $model
check "logits of every token" '[ $rc -eq 0 ] && [ "$(stat -c %s "$dir/logits")" = $((4 * 4096 * $(wc -w <"$dir/ids"))) ] && no_leftovers'
cp "$dir/logits" "$dir/first"
echo other >"$dir/logits"
run --prompt a --logits "$dir/logits" "$dir/no.gguf"
check "another file is not replaced without --force, found before anything else" '[ $rc -eq 1 ] && one_line && says "logits: exists already" && [ "$(cat "$dir/logits")" = other ]'
run --prompt-file <(printf 'In the beginning') --force --logits "$dir/logits" $model
check "with it, it is, and a pipe is read" '[ $rc -eq 0 ] && cmp -s "$dir/first" "$dir/logits"'
cp $model "$dir/model.gguf"
ln "$dir/model.gguf" "$dir/link.gguf"
run --prompt a --logits "$dir/link.gguf" "$dir/model.gguf"
check "never the model" '[ $rc -eq 1 ] && one_line && says "that is the input" && cmp -s $model "$dir/model.gguf"'
printf 'some words' >"$dir/prompt"
run --prompt-file "$dir/prompt" --logits "$dir/prompt" $model
check "never the prompt" '[ $rc -eq 1 ] && one_line && says "that is the input" && [ "$(cat "$dir/prompt")" = "some words" ]'
run --tokens "$dir/ids" --logits "$dir/ids" $model
check "never the ids" '[ $rc -eq 1 ] && one_line && [ -s "$dir/ids" ]'
mkfifo "$dir/pipe"
ln -s /dev/full "$dir/full"
mkdir "$dir/folder"
for target in pipe full folder nowhere/logits; do
    run --prompt a --logits "$dir/$target" $model
    check "not to a $target" '[ $rc -eq 1 ] && one_line && says "$dir/$target"'
done
check "which are still there" '[ -p "$dir/pipe" ] && [ -c "$dir/full" ] && no_leftovers'
(ulimit -f 20; run --tokens "$dir/ids" --force --logits "$dir/logits" $model; exit $rc) 2>>"$dir/err"
check "what cannot be written whole leaves what was there" '[ $? -eq 1 ] && cmp -s "$dir/first" "$dir/logits" && no_leftovers'

# ---- Logits that are no numbers: finite weights, too large for the sums over them ----
"$SPK_BIN/spk-pack" --quiet --recipe native $model "$dir/bad.spk" >"$dir/out" 2>"$dir/err" &&
    "$SPK_BIN/spk-info" --json --tensors "$dir/bad.spk" >"$dir/info"
at=$(awk -F'[:,]' '/"name":.*"STATIC"/ { static = 1 } static && /"offset_bytes"/ { print $2; exit }' "$dir/info")
in_section=$(awk -F'[:,]' '/"name":.*"output_norm.weight"/ { here = 1 } here && /"offset_bytes"/ { print $2; exit }' "$dir/info")
check "the bad model is made" '[ -n "$at" ] && [ -n "$in_section" ]'
# shellcheck disable=SC2046
patch "$dir/bad.spk" $((at + in_section)) $(for _ in $(seq 256); do echo ff ff 7f 7f; done)
for backend in auto ref; do
    run --tokens "$dir/ids" -n 4 --backend $backend "$dir/bad.spk"
    check "a NaN is an error, backend $backend" '[ $rc -eq 1 ] && one_line && grep -qE "bad.spk: position $(($(wc -w <"$dir/ids") - 1)): the logit of token [0-9]+ is (NaN|[-+]inf)$" "$dir/err"'
    check "and no text, backend $backend" '! grep -q "[^[:space:]]" "$dir/out"'
done
run --tokens "$dir/ids" -n 4 --temp 1 --json "$dir/bad.spk"
check "when sampling, too, and in JSON" '[ $rc -eq 1 ] && one_line && [ ! -s "$dir/out" ]'
run --tokens "$dir/ids" --force --logits "$dir/logits" "$dir/bad.spk"
check "and no file of them" '[ $rc -eq 1 ] && one_line && says "position 0: the logit of token" && cmp -s "$dir/first" "$dir/logits" && no_leftovers'
"$SPK_BIN/spk-bench" --contexts 1 --tokens 1 --prompt 1 --repeats 1 "$dir/bad.spk" >"$dir/out" 2>"$dir/err"
check "and no speed" '[ $? -eq 1 ] && one_line && says "position 0: the logit of token" && [ ! -s "$dir/out" ]'

# ---- Output that cannot be written ends the work ----
"$SPK_BIN/spk-run" --prompt a -n 100 $model >/dev/full 2>"$dir/err"
check "a full disk is one error line" '[ $? -eq 1 ] && one_line && grep -q "writing the output: No space" "$dir/err"'
: >"$dir/out"
{ timeout 20 "$SPK_BIN/spk-run" --prompt a -n 4000000 $model 2>"$dir/err"; echo $? >"$dir/rc"; } | head -c 20 >"$dir/out"
check "a closed pipe ends the generation" '[ "$(cat "$dir/rc")" = 1 ] && [ "$(grep -vc warning "$dir/err")" = 1 ] && grep -q "writing the output: Broken pipe" "$dir/err"'
"$SPK_BIN/spk-run" --prompt a -n 2 --json $model >/dev/full 2>"$dir/err"
check "JSON is output, too" '[ $? -eq 1 ] && grep -q "writing the output" "$dir/err"'

# ---- Refusals: one line ----
refuses() { check "refuses $1" "[ \$rc -eq $2 ] && one_line && says \"$3\" && [ ! -s \"\$dir/out\" ]"; }
: >"$dir/empty"
run --prompt '' $model
refuses "an empty prompt" 2 "--prompt ''"
run --prompt-file "$dir/empty" $model
refuses "an empty prompt file" 1 "empty: holds no token"
run --tokens "$dir/empty" $model
refuses "an empty list of ids" 1 "empty: holds no token"
echo "1 2 three" >"$dir/words"
run --tokens "$dir/words" $model
refuses "a word among ids" 1 "words: entry 2, 'three'"
run --tokens "$dir/nowhere" $model
refuses "a missing list" 1 "nowhere: No such file"
run --tokenize --json --prompt a $model
refuses "--json of ids" 2 "--tokenize"
run --tokenize --logits "$dir/x" --prompt a $model
refuses "ids and logits at once" 2 "--tokenize and --logits"
run --logits "$dir/x" --json --prompt a $model
refuses "--json of logits" 2 "--logits"
run --nonsense $model
refuses "an unknown option" 2 "unknown option '--nonsense'"
run -x $model
refuses "an unknown letter" 2 "unknown option '-x'"
run --chat=yes --prompt a $model
refuses "a value for a flag" 2 "--chat takes no value"
run $model -n
refuses "a missing value" 2 "-n needs a value"
run --threads 1025 --prompt a $model
refuses "too many threads" 2 "--threads '1025': expected a whole number from 1 to 1024"
run --temp 1e-320 --prompt a -n 1 $model
check "a tiny number is a number" '[ $rc -eq 0 ]'
run --fuse router,nonsense --prompt a $model
refuses "an unknown fusion" 2 "--fuse 'nonsense': expected router"
run --no-fuse '' --prompt a $model
refuses "no fusion" 2 "--no-fuse ''"
run --kv q4 --prompt a $model
refuses "an unknown cache type" 2 "--kv 'q4': expected f16 or q8"
run --help
check "help names every option" '[ $rc -eq 0 ] && for o in prompt prompt-file tokens chat context temp top-k top-p min-p seed backend threads kv fuse no-fuse verify tokenize logits json help version; do says "--$o" || false; done'
exit $status
