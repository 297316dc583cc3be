#!/usr/bin/env bash
# tests/coverage.sh BUILD_DIR TEST... - runs the tests of a build with --coverage and prints, for each file of formats/, the
# share of lines that ran and of branches that were taken; then the sums, which must be at least 95 % and 85 %.
set -u
build=$1
shift
find "$build" -name '*.gcda' -delete
tests/run.sh "$build/bin" "$build/tests" "$@" >"$build/tests.log" 2>&1
tail -n 1 "$build/tests.log"
mkdir -p "$build/gcov"
for source in formats/*.c; do
    (cd "$build/gcov" && gcov -b -s "$PWD" -o "../obj/formats" "../../../$source" 2>/dev/null) |
        awk -v want="$source" '
            /^File / { file = $0; gsub(/^File .|.$/, "", file); is_it = file == want || file ~ "/" want "$" }
            is_it && /^Lines executed/ { split($0, a, /[:% ]+/); line_share = a[3]; lines = a[5] }
            is_it && /^Taken at least once/ { split($0, a, /[:% ]+/); branch_share = a[5]; branches = a[7] }
            END { printf "%s %.0f %d %.0f %d\n", want, line_share * lines / 100, lines, branch_share * branches / 100, branches }'
done >"$build/coverage.txt"
awk '{ printf "%-28s lines %5d of %5d %6.1f %%   branches %5d of %5d %6.1f %%\n", $1, $2, $3, $3 ? 100 * $2 / $3 : 100, $4, $5,
              $5 ? 100 * $4 / $5 : 100
       a += $2; b += $3; c += $4; d += $5 }
     END { printf "%-28s lines %5d of %5d %6.1f %%   branches %5d of %5d %6.1f %%\n", "formats/", a, b, 100 * a / b, c, d, 100 * c / d
           exit !(a >= 0.95 * b && c >= 0.85 * d) }' "$build/coverage.txt"
