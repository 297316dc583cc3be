#!/usr/bin/env bash
# tests/cuda_build.sh - the GPU part of the build, where there is an nvcc: all kinds of GPU in one binary, no spills, and
# tools that start without a driver.  Some minutes; run by .ci/run, before the tests, which then find the tree built.
# The last line is "N passed, N failed, N skipped".
set -u
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
ok() { echo "ok $1"; passed=$((passed + 1)); }
check() { if eval "$2"; then ok "$1"; else echo "FAIL $1: $2"; failed=$((failed + 1)); sed 's/^/  /' "$dir/out" | tail -n 20; fi; }

if ! make -n info | grep -q 'GPU backend built by'; then
    echo "SKIP building the GPU backend: $(make -n info | grep -o 'no nvcc[^;]*\|CUDA=0' | head -n 1)"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi

start=$SECONDS
make "-j$(nproc)" all >"$dir/out" 2>&1
rc=$?
check "the tools build with the GPU backend, in $((SECONDS - start)) s" '[ $rc -eq 0 ]'
built=$(make -n info | sed -n 's/.*GPU backend built by .* for sm_\(.*\) and PTX.*/\1/p' | tr -d ,)
check "all kinds of GPU are asked for that this nvcc knows ($built)" '[[ " $built " == *" 80 86 89 90"* ]]'
for arch in $built; do
    check "every kernel is there for sm_$arch" \
        '[ "$(grep -lw "Compiling.*sm_$arch" build/obj/*/*_cuda.ptxas | wc -l)" = "$(grep -l "Compiling entry" build/obj/*/*_cuda.ptxas | wc -l)" ]'
done
if [ ! -e /dev/nvidiactl ]; then
    build/bin/spk-run --backend cuda --prompt x -n 1 tests/models/tiny-qwen35-q4_k_m.gguf >"$dir/out" 2>&1
    rc=$?
    check "without a driver a tool starts, and says that there is no GPU" \
        '[ $rc -eq 1 ] && [ "$(wc -l <"$dir/out")" = 1 ] && grep -q "backend cuda: no usable GPU" "$dir/out"'
    build/bin/spk-run --prompt x -n 1 tests/models/tiny-qwen35-q4_k_m.gguf >"$dir/out" 2>&1
    rc=$?
    check "and runs on the CPU" '[ $rc -eq 0 ]'
fi
grep -n '__global__' kernels/*.cu kernels/*.cuh requant/*.cu requant/*.cuh | grep -vE '__launch_bounds__|__maxnreg__' >"$dir/out"
check "every kernel states its launch bounds or registers" '[ ! -s "$dir/out" ]'
ldd build/bin/spk-run >"$dir/out"
check "no CUDA library is needed to start" '! grep -qi "cuda\|nvidia\|stdc++" "$dir/out"'

# ---- A build that must fail ----
mkdir -p "$dir/tree/kernels" "$dir/tree/tests"
cp Makefile "$dir/tree"
cp kernels/ptxas.awk "$dir/tree/kernels"
build() { make -C "$dir/tree" CUDA_ARCH="80 90" build/obj/tests/gpu_planted.o >"$dir/out" 2>&1; rc=$?; }
says() { grep -qE -- "$1" "$dir/out"; }
cat >"$dir/tree/tests/planted.cuh" <<'CU'
#define VALUES 8
CU
cat >"$dir/tree/tests/gpu_planted.cu" <<'CU'
#include "tests/planted.cuh"
__global__ void __launch_bounds__(1024) planted(float *p, int n) {
    float v[VALUES], sum = 0;
#pragma unroll
    for (int i = 0; i < VALUES; i++) v[i] = p[i * n + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VALUES; i++) sum = sum * v[VALUES - 1 - i] + v[i];
    p[threadIdx.x] = sum;
}
CU
build
check "a kernel that keeps to its registers builds" '[ $rc -eq 0 ] && [ -f "$dir/tree/build/obj/tests/gpu_planted.o" ]'
sed -i 's/8/96/' "$dir/tree/tests/planted.cuh"
build
check "a changed header is seen, and spills are refused, by name, architecture and bytes" \
    '[ $rc -ne 0 ] && [ "$(grep -c "none are allowed" "$dir/out")" = 2 ] && says "planted\(float\*, int\) for sm_90: [0-9]+ bytes of stack, [1-9][0-9]* bytes of spill stores"'
check "and nothing is left of it" '[ ! -f "$dir/tree/build/obj/tests/gpu_planted.o" ]'
echo '__global__ void planted(double *p) { p[0] = sin(p[1]); }' >"$dir/tree/tests/gpu_planted.cu"
build
check "a stack is refused" '[ $rc -ne 0 ] && says "planted\(double\*\) for sm_90: [1-9][0-9]* bytes of stack, 0 bytes of spill stores"'
echo 'static int unused; __global__ void planted(float *p) { p[0] = 1; }' >"$dir/tree/tests/gpu_planted.cu"
build
check "a warning of the host's compiler is an error" '[ $rc -ne 0 ] && says unused'

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
