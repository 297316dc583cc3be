#!/usr/bin/env bash
# tests/emulator/faults.sh DIR - the emulated GPU finds what it is for: one mistake at a time in a copy of the kernels, which the
# program must not pass.  DIR is build/emulate.  Prints `ok` or `FAIL` for each.
set -u
dir=$1
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
status=0
flags="-std=c++17 -O1 -g -D_GNU_SOURCE -Itests/emulator/include -I$tree -I. -ffp-contract=off -pthread -x c++ -fno-strict-aliasing -w"

# What a program says on lines that are no `ok`.
found() { grep -v '^ok ' "$tree/log" | grep -m1 -oE -- "$1"; }

# plant NAME FILE PERL UNIT VARIANT SEED SAYS PROGRAM...: the program must fail, and say SAYS (a regular expression).  FILE and UNIT
# are of kernels/, unless they name a folder.  sms: of the device, 4 if not set.
plant() {
    local name=$1 file=$2 edit=$3 unit=$4 variant=$5 seed=$6 says=$7 program=$8 arch=900 more=
    shift 8
    case $file in */*) ;; *) file=kernels/$file ;; esac
    case $unit in */*) ;; *) unit=kernels/$unit ;; esac
    case $variant in 80) arch=800 ;; races) more="-DSPK_EMULATOR_RACES -fsanitize=thread" ;; esac
    rm -rf "$tree/kernels" "$tree/requant"
    cp -r kernels requant "$tree/"
    rm "$tree/kernels/ptx_cuda.cuh"
    perl -0pi -e "$edit" "$tree/$file"
    if cmp -s "$file" "$tree/$file"; then echo "FAIL fault '$name' is not planted"; status=1; return; fi
    # shellcheck disable=SC2086
    if ! { ${CXX:-g++} $flags -D__CUDA_ARCH__=$arch $more -c -o "$tree/unit.o" "$tree/$unit.cu" &&
           ${CXX:-g++} -o "$tree/program" "$tree/unit.o" "$dir/../obj/tests/$program.o" "$dir/$variant/libspk.a" \
               -lzstd -lxxhash -lpcre2-8 -lcjson -lm -lpthread -ldl; } >"$tree/log" 2>&1; then
        echo "FAIL fault '$name' does not build"; sed 's/^/  /' "$tree/log" | head -n 5; status=1; return
    fi
    SPK_EMULATOR_SEED=$seed SPK_EMULATOR_SMS=${sms:-4} timeout 300 "$tree/program" "$@" >"$tree/log" 2>&1 &
    local pid=$!
    while kill -0 $pid 2>/dev/null && [ -z "$(found "$says")" ]; do sleep 0.2; done     # the first words are enough
    kill $pid 2>/dev/null
    wait $pid 2>/dev/null
    if [ -n "$(found "$says")" ]; then echo "ok fault '$name': $(found "$says")"
    else echo "FAIL fault '$name' is not found"; tail -n 4 "$tree/log" | sed 's/^/  /'; status=1; fi
}
kernels=(checkkern --cuda --quick)
attention=(gpu_attention --max-context 70)

plant "no barrier after the input vector" input_cuda.cuh 's/    __syncthreads\(\);\n    if \(!has_norm\)/    if (!has_norm)/' gemv_cuda 90 0 'row\[0\]: got' "${kernels[@]}"
plant "no barrier after the input vector, as a race" input_cuda.cuh 's/    __syncthreads\(\);\n    if \(!has_norm\)/    if (!has_norm)/' gemv_cuda races 1 'race: .*' "${kernels[@]}"
plant "a ring that is not waited for" rows_cuda.cuh 's/ +ring\.wait\(stage\);\n//' gemv_cuda 90 0 'row\[[0-9]+\]: got|under way' "${kernels[@]}"
plant "a ring that is not waited for, sm_80" ring_cuda.cuh 's/ptx::cp_async_wait_group<.>\(\);/;/g' gemv_cuda 80 0 'row\[[0-9]+\]: got|under way' "${kernels[@]}"
plant "a stage filled before all lanes have read it" rows_cuda.cuh 's/__syncwarp\(\);\n( +fill\(stage\);)/\n$1/' gemv_cuda races 0 'race: .*' "${kernels[@]}"
plant "16 bytes too many are expected" ring_cuda.cuh 's/size_bytes \* piece_count\);/size_bytes * piece_count + 16);/' gemv_cuda 90 0 'mbarrier: .*' "${kernels[@]}"
plant "shared memory that is too small" gemv_cuda.cu 's/return fixed \+ a\.warps \* a\.stage_count \* a\.stage_bytes;/return fixed + a.warps * a.stage_count * a.stage_bytes - 256;/' gemv_cuda 90 0 'outside of .*|is not in the CTA.*' "${kernels[@]}"
plant "the next plane of a tile" tile_cuda.cuh 's/QS \+ 2 \* c \+ h\)/QS + 2 * c + h + 1)/' gemv_cuda 90 0 'row\[[0-9]+\]: got' "${kernels[@]}"
plant "one tile too far" rows_cuda.cuh 's/\(size_t\)fill_piece \* shape/(size_t)(fill_piece + 1) * shape/' gemv_cuda 90 0 'row\[[0-9]+\]: got|of an allocation' "${kernels[@]}"
plant "riders that have not arrived" input_cuda.cuh 's/if \(riders\.count > 0\) riders\.arrive\(\);//' gemv_cuda 90 0 'row\[[0-9]+\]: got|under way' "${kernels[@]}"
plant "a key that is not cleared" gemv_cuda.cu 's/if \(threadIdx\.x == 0\) best = 0;//' gemv_cuda 90 0 'greedy .*' "${kernels[@]}"
plant "a lane that is not at the barrier" select_cuda.cuh 's/    __syncwarp\(\);\n\}/    if (lane != 3) __syncwarp();\n}/' experts_cuda 90 0 'lanes? .*|everybody waits' "${kernels[@]}"
plant "a thread that leaves before a shuffle" gdn_cuda.cu 's/(const head_gates gate = \{[^;]*;)/$1 if (threadIdx.x == 70) return;/' gdn_cuda 90 0 'lanes .*|ends while .*' "${kernels[@]}"
plant "an input that is read before the wait" gdn_cuda.cu 's/    chain_wait\(\);\n(    const bool gates)/$1/' gdn_cuda 90 1 'the GPU is off by .*' gpu_layers packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf 8
plant "a signal that is not awaited" experts_cuda.cu 's/else if \(lane == 0 && warp == 0\) await\(a\.routed_ready\);//' experts_cuda 90 1 "experts' layer [^]]*|router [^]]*" "${kernels[@]}"
plant "a signal that is not awaited, held" held_experts_cuda.cu 's/else if \(threadIdx\.x == 0\) await\(a\.routed_ready\);//' held_experts_cuda 90 1 "experts' layer [^]]*|router [^]]*" "${kernels[@]}"
plant "a signal that is given before the wait" held_experts_cuda.cu 's/(    chain_wait\(\);\n)(    if \(a\.routed_ready\.d_flag != nullptr[^\n]*\n)/$2$1/' held_experts_cuda 90 1 "experts' layer [^]]*|router [^]]*" "${kernels[@]}"
plant "the last of equal lanes" select_cuda.cuh 's/__ffs\((__ballot_sync\(FULL, left\[0\] == top\))\) - 1/31 - __builtin_clz($1)/' held_experts_cuda 90 0 'router [^]]*' "${kernels[@]}"
plant "the first of equal keys again" select_cuda.cuh 's/equal &= equal - 1;/;/' held_experts_cuda 90 0 'router [^]]*' "${kernels[@]}"
plant "the weight of another rank" held_experts_cuda.cu 's/weight_of\(rank0 \+ slot,/weight_of((rank0 + slot) ^ 1,/' held_experts_cuda 90 0 'router [^]]*|experts_down [^]]*' "${kernels[@]}"
plant "barriers of other warps that are not set up" held_gemv_cuda.cu 's/            __syncthreads\(\);             \/\* all barriers are set up \*\/\n//' held_gemv_cuda 90 1 'mbarrier.*' "${kernels[@]}"
plant "a wait for a warp that has no tiles" held_gemv_cuda.cu 's/if \(warp >= S::BEHIND && is_there\(\)\)/if (warp >= S::BEHIND)/' held_gemv_cuda 90 0 'nobody will ever give.*' "${kernels[@]}"
plant "fifth bits one place off" tile_cuda.cuh 's/bits\[t\]\[h\], 3 - 2 \* c/bits[t][h], 4 - 2 * c/' held_gemv_cuda 90 0 'row\[[0-9]+\]: got' "${kernels[@]}"
plant "a long stream that is spread wrongly" gemv_cuda.cu 's/cta \* a\.warps \+ warp : cta/cta * a.warps + warp + 1 : cta/' gemv_cuda 90 0 'row\[[0-9]+\]: got' "${kernels[@]}"
plant "a tile of a long stream asked for while it is read" long_gemv_cuda.cu 's/        __syncwarp\(\);\n( +ask\(stage\);)/$1/' long_gemv_cuda races 0 'race: .*' "${kernels[@]}"
plant "a long stream's neighbours mixed up" long_gemv_cuda.cu 's/threadIdx\.x \/ 32, asked = unit;/threadIdx.x \/ 32, asked = unit ^ 1;/' long_gemv_cuda 90 0 'row\[[0-9]+\]: got|nobody will ever give.*' "${kernels[@]}"
plant "warps of a long stream whose best rows are forgotten" long_gemv_cuda.cu 's/if \(best != 0\) atomicMax/if (best != 0 \&\& threadIdx.x < 32) atomicMax/' long_gemv_cuda 90 0 'greedy .*' "${kernels[@]}"
plant "a contribution that is stored, not added" router_cuda.cuh 's/atomicAdd\(\(unsigned long long \*\)a\.sums \+ router_place\(row\), \(unsigned long long\)sum\)/a.sums[router_place(row)] = sum/' router_cuda 90 0 'sum\[[0-9]+\]: got' "${kernels[@]}"
plant "a contribution that is stored, not added, by a projection" router_cuda.cuh 's/atomicAdd\(\(unsigned long long \*\)a\.sums \+ router_place\(row\), \(unsigned long long\)sum\)/a.sums[router_place(row)] = sum/' held_gemv_cuda 90 0 'sum\[[0-9]+\]: got' "${kernels[@]}"
plant "sums in other places" router_cuda.cuh 's/i \/ 4 \* 16 \+ i % 4/i \/ 4 * 16 + (i ^ 1) % 4/' held_gemv_cuda 90 0 'sum\[[0-9]+\]: got|word [0-9]+ of the sums' "${kernels[@]}"
plant "sums that are looked for in other places" router_cuda.cuh 's/i \/ 4 \* 16 \+ i % 4/i \/ 4 * 16 + (i ^ 1) % 4/' experts_cuda 90 0 'experts_(up|down) [^]]*|router [^]]*' "${kernels[@]}"
plant "sums that are looked for in other places, held" router_cuda.cuh 's/i \/ 4 \* 16 \+ i % 4/i \/ 4 * 16 + (i ^ 1) % 4/' held_experts_cuda 90 0 'experts_(up|down) [^]]*|router [^]]*' "${kernels[@]}"
plant "a NaN that counts as the least" router_cuda.cuh 's/fmaxf\(fminf\(contribution, ROUTER_LARGEST\), -ROUTER_LARGEST\)/fminf(fmaxf(contribution, -ROUTER_LARGEST), ROUTER_LARGEST)/' router_cuda 90 0 'sum\[[0-9]+\]: got' "${kernels[@]}"
plant "contributions that are cut off, not rounded" router_cuda.cuh 's/__float2ll_rn\(/(long long)(/' router_cuda 90 0 'sum\[[0-9]+\]: got' "${kernels[@]}"
plant "squares of the neighbours" held_gemv_cuda.cu 's/router_square\(a\.router, blockIdx\.x,/router_square(a.router, blockIdx.x ^ 1,/' held_gemv_cuda 90 0 'squares\[[0-9]+\]: ' "${kernels[@]}"
plant "lanes of a scale that are not added" router_cuda.cuh 's/warp_sum\(total\)/total/' experts_cuda 90 0 'weight\[[0-9]+\]: got|shared\[[0-9]+\]: got' "${kernels[@]}"
plant "a router's weights of the next columns" held_gemv_cuda.cu 's/\(uint64_t\)blockIdx\.x \* bytes/(uint64_t)((blockIdx.x + 1) % gridDim.x) * bytes/' held_gemv_cuda 90 0 'sum\[[0-9]+\]: got' "${kernels[@]}"
plant "a router's weights that are not waited for" held_gemv_cuda.cu 's/if \(copies_router\(\)\) part\.copy\(\)\.wait\(0\);//' held_gemv_cuda 90 0 'sum\[[0-9]+\]: got|under way|nobody' "${kernels[@]}"
plant "rows that not all have stored for the router" held_gemv_cuda.cu 's/(part\.copy\(\)\.wait\(0\);\n)    __syncthreads\(\);/$1/' held_gemv_cuda races 1 'race: .*' "${kernels[@]}"
plant "rows of a router that nobody takes" held_gemv_cuda.cu 's/row = place; row < a\.router\.row_count; row \+= blockDim\.x/row = place; row < min(a.router.row_count, blockDim.x); row += blockDim.x/' held_gemv_cuda 90 0 'sum\[[0-9]+\]: got' "${kernels[@]}"
plant "an x that is read before the wait" router_cuda.cu 's/(router_kernel\([^\n]*\n    chain_release\(\);\n)    chain_wait\(\);/$1/' router_cuda 90 1 'sum\[[0-9]+\]: got' "${kernels[@]}"
plant "a shared row that is an expert's" router_cuda.cu 's/w = row < expert_count \? a\.experts : a\.shared/w = a.experts/' router_cuda 90 0 'weight of row .*' "${kernels[@]}"
plant "sums that are not cleared" vector_cuda.cu 's/uint32_t c = i; c < p\.a\.clear_count/uint32_t c = i + 1; c < p.a.clear_count/' vector_cuda 90 0 'word [0-9]+ of [0-9]+ cleared sums' "${kernels[@]}"
plant "a logit of another expert for the shared one" held_experts_cuda.cu 's/router_value\(a\.routing, a\.routing\.expert_count\)/router_value(a.routing, a.routing.expert_count - 1)/' held_experts_cuda 90 0 'shared\[[0-9]+\]: got' "${kernels[@]}"
plant "shared tiles that are asked for once" held_experts_cuda.cu 's/if \(round > 0\) ask_shared<SHARED>\(a, own, shared_unit\);//' held_experts_cuda 90 0 'nobody will ever give.*|shared h[^]]*' "${kernels[@]}"
plant "shared tiles asked for while they are read" held_experts_cuda.cu 's/(put_pair<SHARED>[^\n]*\n)            __syncwarp\(\);\n/$1/' held_experts_cuda races 0 'race: .*' "${kernels[@]}"
plant "rows of another shared tile" held_experts_cuda.cu 's/put_pair<SHARED>\(own, v, factor, shared_unit,/put_pair<SHARED>(own, v, factor, shared_unit ^ 1,/' held_experts_cuda 90 0 'shared h[^:]*' "${kernels[@]}"
plant "a fourth part that is forgotten" input_cuda.cuh 's/if \(p < count\) add_scaled_eight/if (p < min(count, 3u)) add_scaled_eight/' gemv_cuda 90 0 'gemv parts [^]]*' "${kernels[@]}"
plant "a fourth part that is forgotten, held" held_cuda.cuh 's/if \(p < part_count\) add_scaled_eight/if (p < min(part_count, 3u)) add_scaled_eight/' held_gemv_cuda 90 0 'gemv parts [^]]*' "${kernels[@]}"
plant "parts that count by their totals alone" input_cuda.cuh 's/ex2_approx_ftz\(total\[p\]\.x - top\)/ex2_approx_ftz(0.0f)/' held_gemv_cuda 90 0 'gemv parts [^]]*' "${kernels[@]}"
plant "totals of another head" input_cuda.cuh 's/\(at >> shift\);/((at >> shift) ^ 1);/' gemv_cuda 90 0 'gemv parts [^]]*' "${kernels[@]}"
plant "parts one position late" input_cuda.cuh 's/position \/ SPK_CUDA_PART_POSITIONS \+ 1/(position - 1) \/ SPK_CUDA_PART_POSITIONS + 1/' held_gemv_cuda 90 0 'gemv parts [^]]*' "${kernels[@]}"
plant "a fourth part that nobody makes" attention_cuda.cuh 's/t\.split_count = parts_at\(t\.position\);/t.split_count = min(parts_at(t.position), 3u);/' attention_cuda 90 0 'attention, merged\[[0-9]+\]: got' "${kernels[@]}"
plant "parts of more than a round" attention_cuda.cuh 's/size = ROUND;/size = ROUND + 32;/' attention_cuda 90 0 'attention, merged\[[0-9]+\]: got' "${kernels[@]}"
plant "a total that is another part's" attention_merge_cuda.cuh 's/part_totals\)\[part_head\(c\) \+ /part_totals)[/' attention_cuda 90 0 'attention, merged\[[0-9]+\]: got|total\[[0-9]+\] was written' "${kernels[@]}"
sms=16 plant "a slice that every CTA of a part takes" attention_cuda.cuh 's/t\.slice = blockIdx\.x % t\.slice_count;/t.slice = 0;/' attention_cuda 90 0 'heads of 256[^]]*129 positions[^]]*\] head [0-9]+ dim [0-9]+: got' gpu_attention --max-context 130
plant "a wrong lane of a matrix" attention_cache_cuda.cuh 's/row = lane % 16, high = lane \/ 16;\n        if/row = lane % 16, high = lane \/ 8 % 2;\n        if/' attention_cuda 90 0 'off by|out ' "${attention[@]}"
plant "a wrong half of a product" attention_cuda.cu 's/multiply_add\(high\[m\], a\[m\], w\.x, w\.y\)/multiply_add(high[m], a[m], w.y, w.x)/' attention_cuda 90 0 'off by|out ' "${attention[@]}"
plant "weights that not all warps have written" attention_cuda.cu 's/(make_uint4\(high\[0\], high\[1\], low\[0\], low\[1\]\);)\n        __syncthreads\(\);/$1/' attention_cuda races 0 'race: .*' "${attention[@]}"
plant "a cluster that may not have started" sample_cuda.cu 's/c\.wait_for_start\(\);//' sample_cuda 90 0 'may not run yet|twice without' gpu_sample --quick
plant "a histogram that others still write" sample_cuda.cu 's/(merge\(u64 \*weights, uint32_t \*counts, uint32_t n\) const \{\n        )c\.sync\(\);/$1/' sample_cuda 90 1 'differ' gpu_sample --quick
plant "lanes that are summed in another order" requant/quant_vectors_cuda.cuh 's/sum \+= vec_lane\(\*v, j\)/sum += vec_lane(*v, SPK_QUANT_LANES - j)/' requant/quant_affine_cuda 90 0 'blocks differ' gpu_quant
plant "halves that are rounded up" requant/quant_vectors_cuda.cuh 's/__half2float\(__float2half_rn\(\*v\)\)/__half2float(__float2half_ru(*v))/' requant/quant_symmetric_cuda 90 0 'blocks differ' gpu_quant --quick
plant "tiles on a grid that nobody looks at again" requant/quant_kernel_cuda.cuh 's/= may_be_exact;/= 0;/' requant/quant_symmetric_cuda 90 0 'blocks differ' gpu_quant --quick
plant "a fit that is packed before all have stored it" requant/quant_affine_cuda.cu 's/(make_zeros\(w\);)\n    __syncwarp\(\);/$1/' requant/quant_affine_cuda races 0 'race: .*|blocks differ' gpu_quant --quick
exit $status
