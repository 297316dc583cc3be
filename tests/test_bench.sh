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

bench --backend cpu --contexts 5,17 --tokens 4 --prompt 20 --repeats 2 --threads 2 --json "$dir/report" $original $model
check "two models are measured" '[ $rc -eq 0 ] && says "$original" && says "$model" && says "second / first"'
check "machine, threads and version are named" 'says "2 threads" && says "$("$SPK_BIN/spk-bench" --version | sed s/-bench//)" && says "read bandwidth"'
check "both contexts have a row" '[ "$(grep -c "^  decode @5 " "$dir/out")" = 2 ] && [ "$(grep -c "^  decode @17 " "$dir/out")" = 2 ] && [ "$(field context 2)" = 17 ]'
check "fewer bits are fewer bytes a token" 'holds "$(field bytes_per_token 2) > 0 && $(field bytes_per_token 2) < $(field bytes_per_token 1)"'
check "bytes a second are bytes a token times tokens a second" \
    'holds "($(field bytes_per_s) / ($(field bytes_per_token) * $(field tok_per_s 2)) - 1) ^ 2 < 1e-18"'
check "and a share of the ceiling" 'holds "($(field fraction_of_ceiling) * $(field ceiling_bytes_per_s) / $(field bytes_per_s) - 1) ^ 2 < 1e-18"'
check "the median of two is their mean" \
    'holds "($(sed -n "s/.*\"samples\":[[:space:]]*\[\([0-9.e+-]*\), \([0-9.e+-]*\)\].*/(\1 + \2) \/ 2/p" "$dir/report" | head -n 1) / $(field tok_per_s) - 1) ^ 2 < 1e-18"'
check "packs are told from GGUF files, and the state has a size" '[ "$(field pack)" = false ] && [ "$(field pack 2)" = false ] && holds "$(field state_bytes) > 0"'
"$SPK_BIN/spk-pack" --quiet $model "$dir/model.spk" >/dev/null
cp "$dir/report" "$dir/first"
rm -f "$dir/closed"
ASAN_OPTIONS=${ASAN_OPTIONS:-}:verify_asan_link_order=0 stdbuf -oL "$SPK_BIN/spk-bench" --backend cpu --contexts 2 --tokens 1 --prompt 1 --repeats 1 --json "$dir/closed" "$dir/model.spk" >&- 2>"$dir/err"; rc=$?
check "a closed stdout is no way into the report" '[ $rc -eq 1 ] && python3 -m json.tool "$dir/closed" >/dev/null && ! grep -q "decode @2" "$dir/closed"'
bench --backend cpu --contexts 2 --tokens 1 --prompt 1 --repeats 1 --force --json "$dir/report" "$dir/model.spk"
check "a pack is one" '[ $rc -eq 0 ] && [ "$(field pack)" = true ]'
cp "$dir/first" "$dir/report"
check "weights and state are told apart" 'says "a token)" && grep -qE "^  state +[0-9.]+ [kMG]?B, caches and scratch for 3 tokens" "$dir/out"'
check "no number is missing or beyond JSON" '! grep -qiE "null|nan|inf" "$dir/report"'

refuses() { check "refuses $1" "[ \$rc -eq $2 ] && [ \"\$(wc -l <\"\$dir/err\")\" = 1 ] && says \"$3\""; }
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
bench --ab router,nonsense $model
refuses "a switch that is none" 2 "--ab 'nonsense': expected router"
bench --fuse nonsense $model
refuses "a fused kernel that is none" 2 "--fuse 'nonsense': expected router"
bench --kv q4 $model
refuses "a cache of another type" 2 "--kv 'q4': expected f16 or q8"
bench --ab all $model $model
refuses "switches of two models" 2 "--ab takes one model, got 2"
bench --ab all --backend cpu $model
refuses "switches without a GPU" 1 "only cuda has fused kernels to leave out"
bench --nonsense $model
refuses "an unknown option" 2 "unknown option '--nonsense'"
bench --threads 1025 $model
refuses "too many threads" 2 "--threads '1025': expected a whole number from 1 to 1024"
bench --contexts 16777216 $model
refuses "more context than there can be" 2 "--contexts, --repeats and --tokens need a context of"
cp $model "$dir/model.gguf"
bench --json "$dir/model.gguf" "$dir/model.gguf"
refuses "to replace a model by its report" 1 "that is the input"
check "and left the model alone" 'cmp -s $model "$dir/model.gguf"'
bench --json "$dir/report" "$dir/no.gguf"
refuses "to replace a report without --force, before anything else" 1 "report: exists already"
bench --json "$dir/nowhere/report" "$dir/no.gguf"
refuses "a report that cannot be written, before anything else" 1 "nowhere/report"
exit $status
