#!/usr/bin/env bash
# tests/run.sh BIN_DIR TEST_DIR TEST... - run test programs and scripts; the last line is "N passed, N failed, N skipped".
# A program that ends non-zero without a FAIL line of its own counts as one failure, so a crash cannot hide.  Status 77 is a
# skip: there is no GPU, say.  A TEST that is a source (*.cu) was not built, and is a skip too.
set -u
export SPK_BIN=$1 SPK_TEST_BIN=$2
shift 2
passed=0 failed=0 skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for t in "$@"; do
    echo "== $t"
    case $t in *.cu)
        echo "SKIP $t: not built without nvcc"
        skipped=$((skipped + 1))
        continue ;;
    esac
    "$t" >"$log" 2>&1 </dev/null
    rc=$?
    cat "$log"
    p=$(grep -c '^ok ' "$log") f=$(grep -c '^FAIL ' "$log") s=$(grep -c '^SKIP ' "$log")
    if [ "$rc" -eq 77 ] && [ $((f + s)) -eq 0 ]; then echo "SKIP $t"; s=1; fi
    if [ "$rc" -ne 0 ] && [ "$rc" -ne 77 ] && [ "$f" -eq 0 ]; then echo "FAIL $t: exit status $rc"; f=1; fi
    if [ "$rc" -eq 0 ] && [ "$f" -ne 0 ]; then echo "FAIL $t: printed FAIL but exited 0"; fi
    if [ $((p + f + s)) -eq 0 ]; then echo "FAIL $t: ran no test"; f=1; fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
