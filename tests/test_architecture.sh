#!/usr/bin/env bash
# The rules of DESIGN.md that a compiler does not enforce.  Each rule is a function over the tree in the current folder
# that prints a line for each violation; the last part breaks every rule in a scratch copy and expects its function to
# speak.
set -u
status=0
ok() { echo "ok $1"; }
bad() { echo "FAIL $1"; status=1; }

sources() { find "$@" -type f \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \); }
library_sources() { sources formats kernels runtime requant | grep -v '_main\.c$'; }

# Code without comments: file:line:text.
code_of() {
    awk 'FNR == 1 { inside = 0 }
         { line = $0; out = ""
           while (line != "") {
               if (inside) {
                   end = index(line, "*/")
                   if (!end) break
                   line = substr(line, end + 2); inside = 0
               } else {
                   block = index(line, "/*"); rest = index(line, "//")
                   if (rest && (!block || rest < block)) { out = out substr(line, 1, rest - 1); line = "" }
                   else if (block) { out = out substr(line, 1, block - 1); line = substr(line, block + 2); inside = 1 }
                   else { out = out line; line = "" }
               }
           }
           print FILENAME ":" FNR ":" out }' "$@"
}

# formats <- kernels <- runtime; formats <- requant; tools' main files may use everything, nobody includes tests.
# requant's *_cuda files also know the file of instructions, kernels/ptx_cuda.cuh.
arrows() {
    local folder allowed
    for folder in formats kernels runtime requant; do
        case $folder in
            formats) allowed='formats' ;;
            kernels) allowed='formats|kernels' ;;
            runtime) allowed='formats|kernels|runtime' ;;
            requant) allowed='formats|requant' ;;
        esac
        library_sources | grep "^$folder/" | xargs grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' /dev/null |
            grep -vE "\"($allowed)/[A-Za-z0-9_.]+\"" | grep -vE '^requant/[a-z0-9_]*_cuda\.cuh?:.*"kernels/ptx_cuda\.cuh"'
    done
}

# formats/cli.h prints: only a main file, and its own source, include it.
cli_in_main_only() {
    library_sources | grep -v '^formats/cli\.c$' | xargs grep -n '"formats/cli\.h"' /dev/null
}

# Libraries neither print nor end the process.
silent_libraries() {
    # shellcheck disable=SC2046
    code_of $(library_sources | grep -v '^formats/cli\.c$') |
        grep -E -e '\<(exit|_exit|_Exit|quick_exit|abort|printf|vprintf|puts|putchar|perror)[[:space:]]*\(' \
            -e '\<(stdout|stderr)\>' |
        grep -vE ':[[:space:]]*#'
}

# A tool is guarded against inputs that are cut, and closed standard streams, before it can open anything: the first call of
# its main().
guard_first() {
    local main
    for main in */*_main.c; do
        code_of "$main" | awk -v main="$main" '/int main\(/ { inside = 1; next }
            inside && /[A-Za-z_0-9]\(/ { if ($0 !~ /:[ \t]*spk_cli_guard_inputs\(TOOL, /) print; found = 1; exit }
            END { if (!found) print main ": no call of spk_cli_guard_inputs" }'
    done
}

file_lengths() {
    { sources formats kernels runtime requant tests; find tests -name '*.sh' -o -name '*.?pp'; } | xargs wc -l |
        awk '$2 != "total" && $1 > 620 { print $2 ": " $1 " lines, at most 620" }'
}

# Every header is complete: it compiles as a translation unit of its own.
headers_alone() {
    local header
    find formats kernels runtime requant tests -name '*.h' -not -path 'tests/emulator/*' | while read -r header; do     # C++
        # shellcheck disable=SC2046
        echo "#include \"$header\"" |
            "${CC:-cc}" -std=c11 -D_GNU_SOURCE -I. $(header_flags "$header") -fsyntax-only -x c - 2>&1 | head -n 3
    done
}
header_flags() { case $1 in *avx2*) [ "$(uname -m)" = x86_64 ] && echo "-mavx2 -mfma -mf16c" ;; esac; }

# What the README names exists: tools, make targets, paths in the repository; and no tool is left out of it.
readme_is_true() {
    local name main
    grep -oE '\<spk-[a-z]+' README.md | sort -u | while read -r name; do
        compgen -G "*/$(echo "${name#spk-}" | tr - _)_main.c" >/dev/null || [ -e "formats/$name.md" ] ||
            echo "README.md: no tool $name"
    done
    for main in */*_main.c; do
        name=spk-$(basename "$main" _main.c | tr _ -)
        grep -q "\<$name\>" README.md || echo "README.md: says nothing of $name"
    done
    grep -oE '(^|`)make [a-z][a-z-]*' README.md | tr -d '`' | sort -u | while read -r _ name; do
        grep -qE "^$name:" Makefile || echo "README.md: no make target $name"
    done
    grep -oE '\<(formats|kernels|runtime|requant|packs|tests)/[A-Za-z0-9_./-]*[A-Za-z0-9_]' README.md | sort -u |
    while read -r name; do
        [ -e "$name" ] || echo "README.md: no file $name"
    done
}

rules="arrows cli_in_main_only silent_libraries guard_first file_lengths headers_alone readme_is_true"

for rule in $rules; do
    found=$($rule)
    if [ -z "$found" ]; then ok "$rule"; else echo "$found" | head -n 20; bad "$rule"; fi
done

# ---- Each rule can fail ----

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fresh_copy() {
    rm -rf "$scratch/tree"
    mkdir "$scratch/tree"
    cp -r formats kernels runtime requant packs tests Makefile README.md "$scratch/tree"
}
# expect RULE TEXT: in the scratch copy RULE must report a line with TEXT.
expect() {
    if (cd "$scratch/tree" && $1) | grep -qF "$2"; then ok "$1 reports $2"; else bad "$1 reports $2"; fi
}

fresh_copy
(
    cd "$scratch/tree" || exit 1
    printf '#include "runtime/runtime.h"\n' >>formats/status.c
    printf '#include "runtime/runtime.h"\n' >>kernels/kernels.h
    printf '#include "requant/quant.h"\n' >>runtime/compare.c
    printf '#include "kernels/kernels.h"\n' >>requant/quant.h
    printf '#include "kernels/cuda.h"\n' >>requant/quant_gpu_cuda.cu
    printf '#include "kernels/ptx_cuda.cuh"\n' >>requant/quant.c
    printf '#include "status.h"\n' >>formats/kv.h
    printf '#include "formats/cli.h"\n' >>runtime/compare.h
    printf 'void chatty(void) { printf("x"); }\n' >>formats/kv.h
    printf 'void deadly(void) { /* why */ exit(1); }\n' >>requant/recipe.h
    printf 'void quiet(void) { /* never exit(1) or printf() */ snprintf(0, 0, ""); } // stderr\n' >formats/quiet.c
    printf 'extern FILE *log_to;\nvoid log_it(void) { log_to = stderr; }\n' >>runtime/compare.c
    for _ in $(seq 621); do echo; done >tests/long.sh
    printf 'missing_type incomplete(void);\n' >formats/incomplete.h
    printf 'Run `spk-imaginary`, then `make nonsense` on tests/nowhere.txt\n' >>README.md
    : >runtime/forgotten_main.c
    sed -i 's/^    spk_cli_guard_inputs(.*/    helper();\n&/' requant/unpack_main.c
    sed -i '/^    spk_cli_guard_inputs(/d' runtime/run_main.c
)
expect arrows formats/status.c
expect arrows kernels/kernels.h
expect arrows runtime/compare.c
expect arrows requant/quant.h
expect arrows requant/quant_gpu_cuda.cu
expect arrows requant/quant.c
expect arrows formats/kv.h
expect cli_in_main_only runtime/compare.h
expect silent_libraries formats/kv.h
expect silent_libraries requant/recipe.h
expect silent_libraries runtime/compare.c
expect guard_first requant/unpack_main.c
expect guard_first runtime/run_main.c
expect file_lengths tests/long.sh
expect headers_alone missing_type
expect readme_is_true spk-imaginary
expect readme_is_true spk-forgotten
expect readme_is_true nonsense
expect readme_is_true tests/nowhere.txt
if (cd "$scratch/tree" && silent_libraries) | grep -qF formats/quiet.c; then bad "comments and snprintf are no output"
else ok "comments and snprintf are no output"; fi
exit $status
