# kernels/ptxas.awk - reads what nvcc said with -Xptxas -v: passes on all but the figures, and fails (exit status 1) with a
# line for each kernel that keeps anything in local memory, by spilled registers or by a stack frame.  -v lenient=1: only
# says so.
function plain(name,    command, text) {
    command = "c++filt '" name "' 2>/dev/null"
    text = name
    command | getline text
    close(command)
    return text
}
/Compiling entry function/ { entries++; arch = $NF; gsub(/'/, "", arch); next }
/Function properties for/  { name = $NF; next }
/bytes stack frame/ {
    reports++
    if ($1 + $5 + $9 > 0) {
        printf "%s for %s: %d bytes of stack, %d bytes of spill stores, %d bytes of spill loads: none are allowed\n",
               plain(name), arch, $1, $5, $9
        bad = 1
    }
    next
}
/^ptxas info/ || /^$/ { next }
{ print }
END {
    if (reports < entries) { print FILENAME ": " entries " kernels, but ptxas reports the stack of " reports + 0; bad = 1 }
    exit bad && !lenient
}
