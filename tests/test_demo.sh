#!/usr/bin/env bash
# The demo runs, fits on a screen, and shows what it promises.
set -u
status=0
check() { if eval "$2"; then echo "ok $1"; else echo "FAIL $1: $2"; sed 's/^/  /' "$out"; status=1; fi; }
out=$(mktemp)
trap 'rm -f "$out"' EXIT

tests/demo.sh "$SPK_BIN" >"$out" 2>&1
rc=$?
check "the demo succeeds" '[ $rc -eq 0 ]'
check "it fits on a screen" '[ "$(wc -l <"$out")" -le 40 ]'
check "it names the commands that it ran" '[ "$(grep -c "^\$ spk-" "$out")" = 3 ]'
check "weights shrink" 'grep -qE "^weights .*-[0-9.]+ %" "$out"'
check "the pack speaks" 'grep -A1 "^\$ spk-run" "$out" | tail -n 1 | grep -qE "[a-z]{3}"'
check "the loss is measured" 'grep -qE "mean KL +[0-9.]+ " "$out"'
exit $status
