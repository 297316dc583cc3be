#!/usr/bin/env bash
# tests/fuzz.sh TEST_DIR SECONDS FUZZER... - each fuzzer for so long: with libFuzzer where build/fuzz has it (make fuzz builds
# it with clang), else as an ordinary program.  Inputs that libFuzzer found worth keeping stay in build/fuzz/corpus; a finding
# is left in build/fuzz/findings, and the exit status is then 1.
set -u
programs=$1 seconds=$2
shift 2
status=0
mkdir -p build/fuzz/findings
for name in "$@"; do
    if [ -x "build/fuzz/tests/$name" ]; then
        mkdir -p "build/fuzz/corpus/$name"
        "$programs/$name" --write-corpus "build/fuzz/corpus/$name"
        "build/fuzz/tests/$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 -verbosity=0 \
            -max_len=100000 -artifact_prefix="build/fuzz/findings/$name-" "build/fuzz/corpus/$name" >"build/fuzz/$name.log" 2>&1
    else
        FUZZ_FINDING_DIR=build/fuzz/findings "$programs/$name" --seconds "$seconds" >"build/fuzz/$name.log" 2>&1
    fi
    rc=$?
    grep -hE 'number_of_executed_units|^# ' "build/fuzz/$name.log" | sed "s/^/$name: /"
    if [ $rc -eq 0 ]; then echo "ok $name"; else echo "FAIL $name: see build/fuzz/$name.log and build/fuzz/findings"; status=1; fi
done
exit $status
