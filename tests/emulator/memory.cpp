/* tests/emulator/memory.cpp - shared memory, copies into it, and the device's memory.
 *
 * A copy is done as late as it may be: when somebody waits for it.  Until then its place holds poison, and its source may
 * change.  With a seed above 1 half of the copies are done at once.
 */
#include "tests/emulator/emulator.hpp"

#include <algorithm>
#include <mutex>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#endif

extern "C" char __start_spk_shared[], __stop_spk_shared[];      /* all __shared__ variables */
__attribute__((section("spk_shared"), used)) static uint64_t section_exists;

namespace emulator {

namespace {

constexpr uint32_t STATIC_AT = 0x400, DYNAMIC_AT = 0x100000, TAIL_BYTES = 256;
constexpr int      TAIL = 0xa6;
constexpr size_t   PAGE = 4096, DEVICE_ALIGN = 256, POISONED_MAX = 64 << 20;
constexpr uint64_t BARRIER_MARK = 0xbabababa5eed5eedu;          /* lies where an mbarrier is */

struct allocation { size_t size_bytes; uint8_t *pages; size_t page_bytes; };
std::map<const uint8_t *, allocation> allocations;
std::mutex allocations_lock;

uint32_t static_bytes() { return (uint32_t)(__stop_spk_shared - __start_spk_shared); }

/* Not memcpy: between two variables lies what the sanitizer lets nobody touch. */
__attribute__((no_sanitize("address"), noinline)) void move_static(uint64_t *to, const uint64_t *from) {
    for (uint32_t i = 0; i < static_bytes() / 8; i++) to[i] = from[i];
}

} // namespace

/* ---- Shared memory ---- */

void shared_begin(cta &c) {
    c.static_shared.assign(static_bytes(), POISON);
    void *memory = nullptr;
    const size_t size = c.of->shared_bytes;
    if (posix_memalign(&memory, 1024, size + TAIL_BYTES) != 0) fail("no memory for %zu bytes of shared memory", size);
    c.shared = (uint8_t *)memory;
    memset(c.shared, POISON, size);
    memset(c.shared + size, TAIL, TAIL_BYTES);
    ASAN_POISON_MEMORY_REGION(c.shared + size, TAIL_BYTES);
}
void shared_end(cta &c) {
    ASAN_UNPOISON_MEMORY_REGION(c.shared + c.of->shared_bytes, TAIL_BYTES);
    for (uint32_t i = 0; i < TAIL_BYTES; i++)
        if (c.shared[c.of->shared_bytes + i] != TAIL) fail("byte %u past the end of dynamic shared memory (%u) was written", i, c.of->shared_bytes);
    if (!c.bulk_copies.empty()) fail("the CTA ends with %zu bulk copies under way", c.bulk_copies.size());
    free(c.shared);
}
void shared_enter(cta &c) { move_static((uint64_t *)(void *)__start_spk_shared, (const uint64_t *)(const void *)c.static_shared.data()); }
void shared_leave(cta &c) { move_static((uint64_t *)(void *)c.static_shared.data(), (const uint64_t *)(const void *)__start_spk_shared); }

bool is_shared(const cta &c, const void *p, uint32_t *offset) {
    const char *at = (const char *)p;
    if (at >= __start_spk_shared && at < __stop_spk_shared) *offset = (uint32_t)(at - __start_spk_shared);
    else if ((const uint8_t *)p >= c.shared && (const uint8_t *)p < c.shared + c.of->shared_bytes)
        *offset = static_bytes() + (uint32_t)((const uint8_t *)p - c.shared);
    else return false;
    return true;
}

uint32_t shared_address_of(const void *p) {
    const cta &c = *self->block;
    const char *at = (const char *)p;
    if (at >= __start_spk_shared && at < __stop_spk_shared) return STATIC_AT + (uint32_t)(at - __start_spk_shared);
    const size_t offset = (size_t)((const uint8_t *)p - c.shared);
    if ((const uint8_t *)p < c.shared || offset > c.of->shared_bytes) fail("%p is not in the CTA's shared memory", p);
    return DYNAMIC_AT + (uint32_t)offset;
}
uint8_t *shared_at(uint32_t address, uint32_t size_bytes, uint32_t align_bytes, const char *what) {
    const cta &c = *self->block;
    if (address % align_bytes != 0) fail("%s: the shared address %#x is not aligned to %u", what, address, align_bytes);
    if (address >= STATIC_AT && (uint64_t)address + size_bytes <= STATIC_AT + static_bytes()) return (uint8_t *)__start_spk_shared + (address - STATIC_AT);
    if (address < DYNAMIC_AT || (uint64_t)address - DYNAMIC_AT + size_bytes > c.of->shared_bytes)
        fail("%s: %u bytes at shared address %#x are outside of the %u of the CTA", what, size_bytes, address, c.of->shared_bytes);
    return c.shared + (address - DYNAMIC_AT);
}

void *shared_of_rank(void *mine, uint32_t rank) {
    const cta &c = *self->block;
    uint32_t offset;
    if (rank >= c.group->ctas.size()) fail("rank %u of a cluster of %zu", rank, c.group->ctas.size());
    if (!is_shared(c, mine, &offset) || offset < static_bytes()) fail("%p is not in dynamic shared memory", mine);
    const cta &other = *c.group->ctas[rank];
    if (!other.has_started) fail("touches the memory of CTA %u of its cluster, which may not run yet", rank);
    if (other.alive == 0) fail("touches the memory of CTA %u of its cluster, which has ended", rank);
    return other.shared + (offset - static_bytes());
}

/* ---- cp.async ---- */

static void do_copy(const copy &c) { memcpy(c.to, c.from, c.size_bytes); }
static bool is_early() { return is_random() && random_below(2) == 0; }

void copy_later(uint32_t to, const void *from, uint32_t size_bytes) {
    copy c = { shared_at(to, size_bytes, size_bytes, "cp.async"), (const uint8_t *)from, size_bytes, self->copy_group };
    if ((uintptr_t)from % size_bytes != 0) fail("cp.async: the source %p is not aligned to %u", from, size_bytes);
    check_device_range(from, size_bytes, "cp.async");
    race_write(c.to, size_bytes);
    if (is_early()) {
        do_copy(c);
        return;
    }
    memset(c.to, POISON, size_bytes);
    self->copies.push_back(c);
}
void commit_copies() { self->copy_group++; }
void finish_copies(uint32_t groups_left) {
    auto &list = self->copies;
    const bool is_all = groups_left == UINT32_MAX;
    auto stays = [&](const copy &c) { return !is_all && c.group + groups_left >= self->copy_group; };
    for (const copy &c : list) {
        if (stays(c)) continue;
        race_write(c.to, c.size_bytes);
        do_copy(c);
    }
    list.erase(std::remove_if(list.begin(), list.end(), [&](const copy &c) { return !stays(c); }), list.end());
}

/* ---- Bulk copies ---- */

static mbarrier &barrier_at(uint32_t address, const char *what) {
    uint64_t mark;
    memcpy(&mark, shared_at(address, 8, 8, what), sizeof mark);
    auto found = self->block->barriers.find(address);
    if (found == self->block->barriers.end()) fail("%s: no mbarrier at %#x", what, address);
    if (mark != BARRIER_MARK) fail("%s: the mbarrier at %#x was overwritten", what, address);
    return found->second;
}
static void complete_phase(mbarrier &b) {
    if (b.pending > 0 || b.missing_bytes != 0) return;
    b.phase ^= 1;
    b.pending = b.count;
}

void barrier_init(uint32_t address, uint32_t count) {
    uint8_t *at = shared_at(address, 8, 8, "mbarrier.init");
    race_write(at, 8);
    race_forget(at, 8);
    memcpy(at, &BARRIER_MARK, 8);
    self->block->barriers[address] = { count, count, 0, 0 };
}
void barrier_expect(uint32_t address, uint32_t size_bytes) {
    mbarrier &b = barrier_at(address, "mbarrier.arrive");
    if (b.pending == 0) fail("mbarrier.arrive: the phase before is not complete: a stage is filled again before it was waited for");
    b.missing_bytes += size_bytes;
    b.pending--;
    complete_phase(b);
}
static void finish_bulk(const copy &c) {
    do_copy(c);
    race_forget(c.to, c.size_bytes);
    mbarrier &b = self->block->barriers[c.group];
    b.missing_bytes -= c.size_bytes;
    complete_phase(b);
}
void bulk_copy(uint32_t to, const void *from, uint32_t size_bytes, uint32_t barrier) {
    (void)barrier_at(barrier, "cp.async.bulk");
    const copy c = { shared_at(to, size_bytes, 16, "cp.async.bulk"), (const uint8_t *)from, size_bytes, barrier };
    if (size_bytes == 0 || size_bytes % 16 != 0 || (uintptr_t)from % 16 != 0) fail("cp.async.bulk: %u bytes from %p: not by 16", size_bytes, from);
    check_device_range(from, size_bytes, "cp.async.bulk");
    race_write(c.to, size_bytes);
    if (is_early()) {
        finish_bulk(c);
        return;
    }
    memset(c.to, POISON, size_bytes);
    self->block->bulk_copies.push_back(c);
}
bool barrier_try_wait(uint32_t address, uint32_t parity) {
    mbarrier &b = barrier_at(address, "mbarrier.try_wait");
    if (b.phase != parity) return true;
    auto &list = self->block->bulk_copies;
    bool is_mine = false;
    for (size_t i = 0; i < list.size();) {
        if (list[i].group != address) {
            i++;
            continue;
        }
        const copy c = list[i];
        list.erase(list.begin() + (ptrdiff_t)i);
        finish_bulk(c);
        is_mine = true;
    }
    if (is_mine && b.pending == 0 && b.missing_bytes != 0) fail("mbarrier: %lld bytes more are expected than copied", (long long)b.missing_bytes);
    return b.phase != parity;
}

/* ---- The device's memory ---- */

/* A page before and after it belongs to nobody; it ends where the next one begins, but for what alignment takes. */
void *device_allocate(size_t size_bytes) {
    const size_t room = (size_bytes + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN, inner = (room + PAGE - 1) / PAGE * PAGE;
    void *pages = mmap(nullptr, inner + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return nullptr;
    if (mprotect((uint8_t *)pages + PAGE, inner, PROT_READ | PROT_WRITE) != 0) {
        (void)munmap(pages, inner + 2 * PAGE);
        return nullptr;
    }
    uint8_t *memory = (uint8_t *)pages + PAGE + (inner - room);
    if (size_bytes <= POISONED_MAX) memset(memory, POISON, size_bytes);
    memset(memory + size_bytes, TAIL, room - size_bytes);
    ASAN_POISON_MEMORY_REGION(memory + size_bytes, room - size_bytes);
    std::lock_guard<std::mutex> hold(allocations_lock);
    allocations[memory] = { size_bytes, (uint8_t *)pages, inner + 2 * PAGE };
    return memory;
}

bool device_free(void *memory) {
    std::lock_guard<std::mutex> hold(allocations_lock);
    auto found = allocations.find((const uint8_t *)memory);
    if (found == allocations.end()) return false;
    const allocation a = found->second;
    uint8_t *end = (uint8_t *)memory + a.size_bytes, *room_end = a.pages + a.page_bytes - PAGE;
    ASAN_UNPOISON_MEMORY_REGION(end, (size_t)(room_end - end));
    for (uint8_t *p = end; p < room_end; p++)
        if (*p != TAIL) fail("byte %zu past the end of an allocation of %zu was written", (size_t)(p - end), a.size_bytes);
    allocations.erase(found);
    return munmap(a.pages, a.page_bytes) == 0;
}

/* Large memory that is cleared as a whole is only fetched where it is used. */
void device_fill(void *memory, int byte, size_t size_bytes) {
    uint8_t *begin = (uint8_t *)(((uintptr_t)memory + PAGE - 1) / PAGE * PAGE), *end = (uint8_t *)(((uintptr_t)memory + size_bytes) / PAGE * PAGE);
    if (byte != 0 || size_bytes < (1 << 20) || madvise(begin, (size_t)(end - begin), MADV_DONTNEED) != 0) {
        memset(memory, byte, size_bytes);
        return;
    }
    memset(memory, 0, (size_t)(begin - (uint8_t *)memory));
    memset(end, 0, (size_t)((uint8_t *)memory + size_bytes - end));
}

void check_device_range(const void *from, size_t size_bytes, const char *what) {
    std::lock_guard<std::mutex> hold(allocations_lock);
    auto found = allocations.upper_bound((const uint8_t *)from);
    if (found != allocations.begin()) {
        --found;
        const size_t offset = (size_t)((const uint8_t *)from - found->first);
        if (offset <= found->second.size_bytes && size_bytes <= found->second.size_bytes - offset) return;
        if (offset < found->second.size_bytes + PAGE)
            fail("%s: %zu bytes from byte %zu of an allocation of %zu", what, size_bytes, offset, found->second.size_bytes);
    }
    fail("%s: %p is no device memory", what, from);
}

} // namespace emulator
