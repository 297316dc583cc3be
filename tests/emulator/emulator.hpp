/* tests/emulator/emulator.hpp - a GPU for the project's kernels on one CPU thread; see README.md.
 *
 * A GPU thread is a fiber.  Fibers of a warp meet in a rendezvous: each lane leaves a pointer to what it brings and waits; the
 * last one does the work for all.  Fibers switch only there, at barriers and in polls, so what runs between two of these is
 * ordinary C++, and the same seed gives the same run.
 *
 * CTAs of a grid that are resident take turns.  So do those of the grids after it, as far as programmatic launch edges let
 * these start early.
 */
#ifndef SPK_EMULATOR_HPP
#define SPK_EMULATOR_HPP

#include <stddef.h>
#include <stdint.h>

#include <deque>
#include <functional>
#include <map>
#include <vector>

namespace emulator {

constexpr uint32_t WARP = 32, FULL_MASK = 0xffffffffu, CTA_THREADS_MAX = 1024, CTA_WARPS_MAX = CTA_THREADS_MAX / WARP;
constexpr int      POISON = 0xff;               /* of memory that was not written: NaNs, and indices that are out of range */
constexpr uint32_t STATIC_SHARED_MAX = 8192;    /* what a kernel may have of it, for all that the runtime says */
constexpr uint32_t POLLS_MAX = 1u << 20;        /* in a row with nothing else happening: nobody will give what is polled for */

struct index3 { uint32_t x, y, z; };
struct grid;
struct cta;
struct warp;

struct copy {                                   /* asynchronous, not done yet */
    uint8_t       *to;
    const uint8_t *from;
    uint32_t       size_bytes, group;           /* group: of cp.async, or the mbarrier's address */
};

struct thread {                                 /* one GPU thread */
    index3    index;
    cta      *block;
    warp     *in;
    uint32_t  number, lane;                     /* in the CTA, in the warp */
    void     *stack_pointer, *sanitizer_stack;
    uint8_t  *stack;
    const char *waits_in, *file;                /* what it waits in; NULL: it runs or is ready */
    int       line;
    uint32_t  cluster_phase;                    /* that it arrived in */
    uint32_t  copy_group;                       /* of cp.async, that is open */
    std::vector<copy> copies;
};

enum operation { NO_OPERATION, SYNCWARP, SHUFFLE, BALLOT, MATCH, REDUCE, LDMATRIX, MMA, MOVMATRIX };

struct rendezvous {
    uint32_t  mask, arrived;
    operation kind;
    void     *brought[WARP];
};
struct warp {
    thread     *lanes[WARP];
    uint32_t    alive, ready;                   /* lanes */
    uint32_t    sync_count;                     /* __syncwarp of all lanes, for races.cpp */
    rendezvous  whole;                          /* of the full mask */
    std::vector<rendezvous> parts;              /* of others */
};

struct mbarrier { uint32_t count, pending, phase; int64_t missing_bytes; };

struct cluster {
    std::vector<cta *> ctas;
    uint32_t arrived, phase;
};

struct cta {
    grid     *of;
    index3    index;
    cluster  *group;
    uint32_t  rank;                             /* in the cluster */
    std::vector<thread> threads;
    std::vector<warp>   warps;
    uint32_t  alive, at_barrier, barrier_count; /* barrier_count: barriers passed, for races.cpp */
    uint32_t  ready_warps, polling, giving_way; /* polling: threads that ask again and again */
    bool      has_started, has_released, is_patient;    /* is_patient: it only polled, last time */
    std::vector<uint8_t> static_shared;         /* while another CTA runs */
    uint8_t  *shared;                           /* dynamic */
    std::map<uint32_t, mbarrier> barriers;      /* by shared address */
    std::vector<copy> bulk_copies;
    void     *shadow;                           /* of races.cpp */
};

struct grid {
    const void *function;
    std::function<void()> body;                 /* the kernel with its arguments */
    index3   size, block;
    uint32_t shared_bytes, cluster_size;
    bool     is_programmatic;                   /* may start before the grid before it ends */
    uint32_t started, finished, released;       /* CTAs */
    bool     is_complete;
    grid    *before;                            /* resident and not complete, or NULL */
    std::vector<uint32_t> order;                /* in which clusters start */
    std::vector<cta *> ctas;                    /* resident */
};

extern thread *self;                            /* that runs */
extern grid   *running;                         /* its grid */

/* Ends the program with one line about the running thread. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- Scheduler: scheduler.cpp ---- */

struct options { uint32_t seed, sm_count, sm_version, window; };
const options &settings();
uint32_t random_below(uint32_t n);              /* of the seed's sequence */
bool     is_random();                           /* the order is by chance: seeds above 1 */
void     run(std::deque<grid> &queue);          /* all of them, in stream order */

void     wait_here(const char *what, const char *file, int line);   /* until somebody makes the thread ready */
void     make_ready(thread &t);
void     poll(const char *what);                /* nothing yet: others first */
void     give_way();                            /* something new: those that it lets go on may go first */

rendezvous &arrive(operation kind, uint32_t mask, void *mine, const char *file, int line);
void        depart(rendezvous &r);              /* by the last lane to arrive: the others go on */
const char *name_of(operation kind);

/* The lanes of mask meet; `act(brought)` runs once, when all are there. */
template <typename ACT> inline void meet(operation kind, uint32_t mask, void *mine, const char *file, int line, ACT act) {
    rendezvous &r = arrive(kind, mask, mine, file, line);
    if (r.arrived != r.mask) {
        wait_here(name_of(kind), file, line);
        return;
    }
    act(r.brought);
    depart(r);
}

void cta_barrier(const char *file, int line);
void cluster_arrive();
void cluster_wait(const char *file, int line);
void release_dependents();
void wait_for_predecessor();

/* ---- Memory: memory.cpp ---- */

void     shared_begin(cta &c);                  /* poisoned */
void     shared_end(cta &c);                    /* checks what is left */
void     shared_leave(cta &c);                  /* another CTA's turn */
void     shared_enter(cta &c);
uint32_t shared_address_of(const void *p);
uint8_t *shared_at(uint32_t address, uint32_t size_bytes, uint32_t align_bytes, const char *what);
bool     is_shared(const cta &c, const void *p, uint32_t *offset);   /* offset: static memory, then dynamic */
void    *shared_of_rank(void *mine, uint32_t rank);

void copy_later(uint32_t to, const void *from, uint32_t size_bytes);
void finish_copies(uint32_t groups_left);
void commit_copies();
void bulk_copy(uint32_t to, const void *from, uint32_t size_bytes, uint32_t barrier);
void barrier_init(uint32_t barrier, uint32_t count);
void barrier_expect(uint32_t barrier, uint32_t size_bytes);
bool barrier_try_wait(uint32_t barrier, uint32_t parity);

void *device_allocate(size_t size_bytes);       /* NULL: no memory */
bool  device_free(void *memory);
void  device_fill(void *memory, int byte, size_t size_bytes);
void  check_device_range(const void *from, size_t size_bytes, const char *what);

/* ---- Races: races.cpp, where kernels are compiled to report what they touch ---- */

#ifdef SPK_EMULATOR_RACES
void race_begin(cta &c);
void race_end(cta &c);
void race_write(const void *to, uint32_t size_bytes);       /* by the running thread */
void race_forget(const void *to, uint32_t size_bytes);      /* whoever reads has waited for it */
void race_settle();                                         /* before another thread runs */
#else
inline void race_begin(cta &) {}
inline void race_end(cta &) {}
inline void race_write(const void *, uint32_t) {}
inline void race_forget(const void *, uint32_t) {}
inline void race_settle() {}
#endif

/* ---- Stacks and switches: fiber.cpp ---- */

constexpr size_t STACK_BYTES =
#if defined __SANITIZE_ADDRESS__
    256 << 10;
#else
    64 << 10;
#endif
uint8_t *stack_take();
void     stack_give(uint8_t *stack);            /* checks that it was large enough */
void     fiber_prepare(thread &t, void (*entry)());
void     fiber_switch(thread *from, thread *to);            /* NULL: the host's own stack */
void     fiber_begun();                         /* first thing in an entry */
[[noreturn]] void fiber_end(thread *from, thread *to);

} // namespace emulator

#endif
