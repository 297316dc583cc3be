#!/usr/bin/env bash
# tests/test_emulated.sh [--long] - the GPU's tests on an emulated GPU (tests/emulator/README.md): the tolerances are the GPU's.
#
# Each job is a device (sm_90, sm_80, or sm_90 looking for races), a seed (0: in order, grids one after another as far as they
# can; 1: the other way round, and everything as early as it may be; others: by chance), a count of SMs and a program.  --long: all
# programs and cases, more seeds, and then the planted faults of tests/emulator/faults.sh; a quarter of an hour on two cores.
set -u
dir=${SPK_TEST_BIN:-build/tests}/../emulate
if [ ! -x "$dir/90/checkkern" ]; then
    echo "SKIP the emulated GPU: not built without a C++ compiler, nor with EMULATE=0 or SAN=1"
    exit 0
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
moe=tests/models/tiny-qwen3moe-q4_k_m.gguf hybrid=tests/models/tiny-qwen35-q4_k_m.gguf both=packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf

short_jobs() {
    cat <<JOBS
90 0 4 checkkern --cuda --quick
90 1 8 checkkern --cuda --quick
90 3 8 gpu_layers
90 7 16 gpu_attention --max-context 130
90 5 4 gpu_sample --quick
90 0 4 gpu_generate --quick $hybrid
80 2 4 gpu_layers $both 8
90 2 5 gpu_quant --quick
races 4 6 gpu_layers $both 8
JOBS
}
long_jobs() {
    short_jobs
    echo "90 1 4 gpu_generate --quick $moe"
    local seed
    for seed in 1 2 3 4; do
        echo "80 $seed 4 checkkern --cuda --quick"
        echo "races $seed $((2 + seed)) checkkern --cuda --quick --seed $seed"
        echo "80 $seed $((2 + 2 * seed)) gpu_layers"
        echo "90 $seed $((3 * seed)) gpu_attention --max-context 300 --seed $seed"
    done
    echo "90 1 132 checkkern --cuda --quick"
    echo "90 5 16 gpu_attention --max-context 520"
    echo "90 0 8 checkkern --cuda"
    echo "90 2 4 gpu_sample"
    echo "80 0 4 gpu_sample --quick"
    echo "races 1 5 gpu_attention --max-context 40"
    echo "races 6 4 gpu_sample --quick"
    echo "90 5 6 gpu_generate --quick $both"
    echo "90 0 8 gpu_quant"
    echo "80 1 4 gpu_quant --quick"
    echo "races 3 4 gpu_quant --quick"
}

run_job() {
    local variant=$1 seed=$2 sms=$3 program=$4 log rc name
    shift 4
    [ -x "$dir/$variant/$program" ] || return 0          # no races under other sanitizers
    name="emulated $variant, seed $seed, $sms SMs: $program $*"
    log=$(mktemp -p "$out")
    SPK_EMULATOR_SEED=$seed SPK_EMULATOR_SMS=$sms "$dir/$variant/$program" "$@" >"$log" 2>&1
    rc=$?
    if [ $rc -eq 0 ] && ! grep -q '^FAIL' "$log"; then
        echo "ok $name ($(grep -c '^ok ' "$log"))"
    else
        echo "FAIL $name: exit status $rc"
        grep -v '^ok ' "$log" | tail -n 30 | sed 's/^FAIL/  FAIL/; s/^/  /'
    fi
}
export -f run_job
export dir out
jobs=short_jobs
[ "${1:-}" = --long ] && jobs=long_jobs
# A kernel's static variables are __shared__ ones; in the template of one GCC leaves them out of the section that each CTA has.
lost=$(nm -C "$dir"/90/obj/*/*_cuda.o | grep -E ' [bB] .*\(.*\)::')
if [ -z "$lost" ]; then echo "ok every shared variable is a CTA's own" | tee "$out/first"
else echo "FAIL every shared variable is a CTA's own: not $lost" | head -n 5 | tee "$out/first"; fi
# The pack that a GPU makes is the CPU's.
packs() {
    local device
    for device in cpu cuda; do
        "$dir/90/spk-pack" --quiet --device $device --threads 1 --recipe fast --effort fast "$both" "$out/$device.spk" || return 1
    done
    cmp "$out/cpu.spk" "$out/cuda.spk"
}
if packs >"$out/packs" 2>&1 && grep -q '^quantized  on emulated' "$out/packs"; then echo "ok a pack that is made on an emulated GPU is the CPU's"
else echo "FAIL a pack that is made on an emulated GPU is the CPU's"; tail -n 5 "$out/packs" | sed 's/^/  /'; fi | tee -a "$out/first"
$jobs | xargs -P "$(nproc)" -I{} bash -c 'run_job {}' | tee "$out/all"
[ "${1:-}" = --long ] && { tests/emulator/faults.sh "$dir" | tee -a "$out/all"; }
! grep -q '^FAIL' "$out/first" "$out/all"
