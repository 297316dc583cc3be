# tests/cases.sh - sourced by shell tests whose cases are functions: a scratch folder that is empty before each, and what a tool
# that fails must do.
# shellcheck shell=bash disable=SC2034
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0

fail() { echo "  $*" >&2; result=FAIL; }
skip() { result=SKIP why=": $*"; }

# run STATUS COMMAND...: checks the exit status; what fails must print one line on stderr and nothing on stdout; both are kept in
# $dir/out and $dir/err.
run() {
    local want=$1 rc lines
    shift
    "$@" >"$dir/out" 2>"$dir/err" </dev/null
    rc=$?
    [ "$rc" -eq "$want" ] || fail "$* ended with $rc, expected $want: $(cat "$dir/err")"
    lines=$(wc -l <"$dir/err")
    if [ "$want" -ne 0 ]; then
        [ ! -s "$dir/out" ] || fail "$* failed and printed a result"
        [ "$lines" -eq 1 ] || fail "$* printed $lines lines on stderr"
    fi
}
says() { grep -qF -- "$2" "$dir/$1" || fail "'$2' is not in $1: $(cat "$dir/$1")"; }

# check NAME: the function; what it fails at is said on stderr.
check() {
    result=ok why=
    "$1"
    find "${dir:?}" -mindepth 1 -delete                     # hidden files too
    printf '%-4s %s%s\n' "$result" "$1" "$why"
    [ "$result" != FAIL ] || failed=1
}
