/* tests/emulator/races.cpp - two threads at one byte of shared memory with nothing between them.
 *
 * Kernels are compiled with -fsanitize=thread, whose calls at each load and store end here instead of in that library.  For each
 * byte of a CTA's shared memory the last write and the last reads are kept.  Two accesses are ordered if one thread makes both;
 * if a barrier of the CTA was passed between them; or, within a warp, a __syncwarp of all its lanes (shuffles order nothing); or,
 * between CTAs of a cluster, the cluster's barrier.  Whether the value that two threads write is the same is looked at when the
 * second one has written it: if so, it is no race.  Atomics are not looked at, nor is global memory.
 */
#include "tests/emulator/emulator.hpp"

#include <stdlib.h>
#include <string.h>

namespace emulator {

namespace {

constexpr uint16_t NOBODY = 0, SEVERAL_WARPS = 0xffff, SEVERAL_LANES = 0x8000;

struct access { uint16_t who, cta_time, cluster_time, warp_time; };     /* who: 1 + thread + 1024 * rank in the cluster */
struct cell { access write, read; };

/* A second write of other threads, until its value is known. */
struct { const uint8_t *at; uint8_t value; uint32_t first; } doubt;

access now() {
    const cta &c = *self->block;
    return { (uint16_t)(1 + self->number + CTA_THREADS_MAX * c.rank), (uint16_t)c.barrier_count, (uint16_t)c.group->phase, (uint16_t)self->in->sync_count };
}
uint32_t thread_of(uint16_t who) { return (uint32_t)((who & ~SEVERAL_LANES) - 1) % CTA_THREADS_MAX; }
uint32_t rank_of(uint16_t who) { return (uint32_t)((who & ~SEVERAL_LANES) - 1) / CTA_THREADS_MAX; }

bool is_ordered(const access &before, const access &a) {
    if (before.who == NOBODY || before.who == a.who) return true;
    if (before.who == SEVERAL_WARPS) return before.cta_time != a.cta_time;
    if (rank_of(before.who) != rank_of(a.who)) return before.cluster_time != a.cluster_time;
    if (before.cta_time != a.cta_time) return true;
    return thread_of(before.who) / WARP == thread_of(a.who) / WARP && before.warp_time != a.warp_time;
}

[[noreturn]] void report(const char *what, const access &before, const uint8_t *at) {
    uint32_t offset = 0;
    (void)is_shared(*self->block, at, &offset);
    if (before.who == SEVERAL_WARPS) fail("race: %s by several warps, at byte %u of shared memory", what, offset);
    fail("race: %s by thread %u of CTA %u of its cluster%s, at byte %u of shared memory", what, thread_of(before.who), rank_of(before.who),
         before.who & SEVERAL_LANES ? " and others of its warp" : "", offset);
}

/* The cells of a byte, whoever's it is in the cluster. */
cell *cells_of(const void *p) {
    if (self == nullptr) return nullptr;
    uint32_t offset;
    cta &own = *self->block;
    if (is_shared(own, p, &offset)) return (cell *)own.shadow + offset;
    if (own.group->ctas.size() > 1)
        for (cta *c : own.group->ctas)
            if (c != &own && (const uint8_t *)p >= c->shared && (const uint8_t *)p < c->shared + c->of->shared_bytes) {
                (void)is_shared(*c, p, &offset);
                return (cell *)c->shadow + offset;
            }
    return nullptr;
}

void remember_read(access &read, const access &a) {
    if (read.who == NOBODY || is_ordered(read, a)) read = a;
    else if (read.who != SEVERAL_WARPS && rank_of(read.who) == rank_of(a.who) && thread_of(read.who) / WARP == thread_of(a.who) / WARP)
        read = { (uint16_t)(a.who | SEVERAL_LANES), a.cta_time, a.cluster_time, a.warp_time };
    else read = { SEVERAL_WARPS, a.cta_time, a.cluster_time, 0 };
}

void touched(const void *p, uint32_t size_bytes, bool is_write) {
    cell *cells = cells_of(p);
    if (cells == nullptr) return;
    race_settle();
    const access a = now();
    for (uint32_t i = 0; i < size_bytes; i++) {
        cell &c = cells[i];
        const uint8_t *at = (const uint8_t *)p + i;
        if (!is_ordered(c.write, a)) {
            if (!is_write) report("reads what is written", c.write, at);
            if (doubt.at == nullptr) doubt = { at, *at, c.write.who };
        }
        if (!is_write) {
            remember_read(c.read, a);
            continue;
        }
        if (!is_ordered(c.read, a)) report("writes what is read", c.read, at);
        c.write = a;
    }
}

} // namespace

void race_begin(cta &c) {
    c.shadow = calloc(c.static_shared.size() + c.of->shared_bytes + 1, sizeof(cell));
    if (c.shadow == nullptr) fail("no memory to look for races");
}
void race_end(cta &c) { free(c.shadow); }
void race_write(const void *to, uint32_t size_bytes) { touched(to, size_bytes, true); doubt.at = nullptr; }
void race_forget(const void *to, uint32_t size_bytes) {
    cell *cells = cells_of(to);
    for (uint32_t i = 0; cells != nullptr && i < size_bytes; i++) cells[i].write = {};
}
void race_settle() {
    if (doubt.at == nullptr) return;
    const bool is_same = *doubt.at == doubt.value;
    const uint8_t *at = doubt.at;
    doubt.at = nullptr;
    if (!is_same) report("writes what is written", { (uint16_t)doubt.first, 0, 0, 0 }, at);
}

} // namespace emulator

/* ---- What the compiler calls ---- */

#define SPK_TOUCH(size)                                                                               \
    extern "C" void __tsan_read##size(void *p) { emulator::touched(p, size, false); }                 \
    extern "C" void __tsan_write##size(void *p) { emulator::touched(p, size, true); }                 \
    extern "C" void __tsan_unaligned_read##size(void *p) { emulator::touched(p, size, false); }       \
    extern "C" void __tsan_unaligned_write##size(void *p) { emulator::touched(p, size, true); }       \
    extern "C" void __tsan_volatile_read##size(void *p) { emulator::touched(p, size, false); }        \
    extern "C" void __tsan_volatile_write##size(void *p) { emulator::touched(p, size, true); }
SPK_TOUCH(1)
SPK_TOUCH(2)
SPK_TOUCH(4)
SPK_TOUCH(8)
SPK_TOUCH(16)
extern "C" void __tsan_read_range(void *p, size_t size_bytes) { emulator::touched(p, (uint32_t)size_bytes, false); }
extern "C" void __tsan_write_range(void *p, size_t size_bytes) { emulator::touched(p, (uint32_t)size_bytes, true); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
