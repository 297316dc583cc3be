# tests/check.sh - sourced by the shell tests: a scratch folder, and a check that prints what the tool said where it fails.
# shellcheck shell=bash disable=SC2034
status=0
check() { if eval "$2"; then echo "ok $1"; else echo "FAIL $1: $2"; status=1; sed 's/^/  /' "$dir/out" "$dir/err" | head -n 20; fi; }

model=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
