#!/usr/bin/env bash
# spk-bench from outside: the report is complete and consistent with itself.  No speed is expected.
set -u
status=0
check() { if eval "$2"; then echo "ok $1"; else echo "FAIL $1: $2"; status=1; sed 's/^/  /' "$dir/out" "$dir/err" | head -n 20; fi; }

model=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
original=build/models/tiny-qwen36-bf16.gguf
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

bench() { "$SPK_BIN/spk-bench" "$@" >"$dir/out" 2>"$dir/err"; rc=$?; }
field() { sed -n "s/^[[:space:]]*\"$1\":[[:space:]]*\([^,]*\),\{0,1\}$/\1/p" "$dir/report" | sed -n "${2:-1}p"; }
holds() { awk "BEGIN { exit !($1) }"; }
says() { grep -qF -- "$1" "$dir/out" "$dir/err"; }

bench --contexts 5,17 --tokens 4 --prompt 20 --repeats 2 --threads 2 --json "$dir/report" $original $model
check "two models are measured" '[ $rc -eq 0 ] && says "$original" && says "$model" && says "second / first"'
check "machine, threads and version are named" 'says "2 threads" && says "$("$SPK_BIN/spk-bench" --version | sed s/-bench//)" && says "read bandwidth"'
check "both contexts have a row" '[ "$(grep -c "^  decode @5 " "$dir/out")" = 2 ] && [ "$(grep -c "^  decode @17 " "$dir/out")" = 2 ] && [ "$(field context 2)" = 17 ]'
check "fewer bits are fewer bytes a token" 'holds "$(field bytes_per_token 2) > 0 && $(field bytes_per_token 2) < $(field bytes_per_token 1)"'
check "bytes a second are bytes a token times tokens a second" \
    'holds "($(field bytes_per_s) / ($(field bytes_per_token) * $(field tok_per_s 2)) - 1) ^ 2 < 1e-18"'
check "and a share of the ceiling" 'holds "($(field fraction_of_ceiling) * $(field ceiling_bytes_per_s) / $(field bytes_per_s) - 1) ^ 2 < 1e-18"'
check "the median of two is their mean" \
    'holds "($(sed -n "s/.*\"samples\":[[:space:]]*\[\([0-9.e+-]*\), \([0-9.e+-]*\)\].*/(\1 + \2) \/ 2/p" "$dir/report" | head -n 1) / $(field tok_per_s) - 1) ^ 2 < 1e-18"'
check "no number is missing or beyond JSON" '! grep -qiE "null|nan|inf" "$dir/report"'

refuses() { check "refuses $1" "[ \$rc -eq $2 ] && says '$3'"; }
bench
refuses "no model" 2 "1 or 2 models"
bench $model $model $model
refuses "three models" 2 "1 or 2 models"
bench --contexts 128,x $model
refuses "a context that is no number" 2 "--contexts"
bench --contexts , $model
refuses "an empty list of contexts" 2 "--contexts"
bench --repeats 0 $model
refuses "no repeats" 2 "--repeats"
bench "$dir/nowhere.spk"
refuses "a missing model" 1 "nowhere.spk"
exit $status
