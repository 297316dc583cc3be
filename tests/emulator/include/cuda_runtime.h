/* tests/emulator/include/cuda_runtime.h - of CUDA's header of that name, what the project's kernels use, for the emulator. */
#ifndef SPK_EMULATOR_CUDA_RUNTIME_H
#define SPK_EMULATOR_CUDA_RUNTIME_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#define CUDART_VERSION 13000

/* ---- Keywords ---- */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
/* All such variables lie side by side, and every CTA has a copy of the whole for as long as it lives.  Not those of templates, where
 * GCC does not look at the section: their kernels use dynamic shared memory, and tests/test_emulated.sh sees that they do. */
#define __shared__ static __attribute__((section("spk_shared")))

/* ---- Types ---- */

struct alignas(8) uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
inline uint2 make_uint2(unsigned x, unsigned y) { return { x, y }; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return { x, y, z, w }; }
inline float2 make_float2(float x, float y) { return { x, y }; }
inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }

#include "tests/emulator/device.hpp"
#include "tests/emulator/runtime.hpp"

#endif
