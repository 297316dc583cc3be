/* tests/emulator/scheduler.cpp - whose turn it is: lanes of a warp, warps of a CTA, CTAs of the resident grids. */
#include "tests/emulator/emulator.hpp"

#include <algorithm>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __linux__
#include <dlfcn.h>
#endif

emulator::index3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

thread *self;
grid   *running;
const char WAITS_FOR_CTA[] = "__syncthreads", WAITS_FOR_CLUSTER[] = "the cluster's barrier", WAITS_FOR_GRID[] = "griddepcontrol.wait",
           POLLS[] = "a poll", WAY[] = "its turn", ENDED[] = "its end";

namespace {

std::deque<grid *> resident;            /* in stream order */
uint64_t random_state;
bool     by_chance, last_first;         /* the order, by the seed */
uint32_t polls;                         /* since anything else happened */

uint32_t from_environment(const char *name, uint32_t otherwise, uint32_t low, uint32_t high) {
    const char *text = getenv(name);
    if (text == nullptr || *text == '\0') return otherwise;
    char *end;
    const unsigned long value = strtoul(text, &end, 10);
    if (*end == '\0' && value >= low && value <= high) return (uint32_t)value;
    fprintf(stderr, "FAIL emulator: %s=%s: expected a number from %u to %u\n", name, text, low, high);
    exit(2);
}

/* "function at file:line" of an address of code, as far as the system's tools know it. */
void print_function(const void *function) {
    Dl_info info;
    char command[4096 + 128], line[512];
    if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return;
    snprintf(command, sizeof command, "addr2line -f -C -e '%s' %#zx 2>/dev/null", info.dli_fname,
             (size_t)((const char *)function - (const char *)info.dli_fbase));
    FILE *pipe = popen(command, "r");
    if (pipe == nullptr) return;
    if (fgets(line, sizeof line, pipe) != nullptr) fprintf(stderr, "%.*s", (int)strcspn(line, "\n"), line);
    (void)pclose(pipe);
}

[[noreturn]] void end_program() {
    fflush(stdout);
    fflush(stderr);
    _exit(1);
}

} // namespace

const options &settings() {
    static const options o = { from_environment("SPK_EMULATOR_SEED", 0, 0, UINT32_MAX), from_environment("SPK_EMULATOR_SMS", 8, 2, 1024),
                               __CUDA_ARCH__ / 10,
                               from_environment("SPK_EMULATOR_WINDOW", 3, 1, 16) };
    if (random_state == 0) {
        random_state = 0x9e3779b97f4a7c15u * (o.seed + 1);
        by_chance = o.seed > 1;
        last_first = o.seed == 1;
    }
    return o;
}
bool is_random() { return by_chance; }
static bool is_eager() { return settings().seed % 2 == 1; }     /* later grids first, last lanes first */

uint32_t random_below(uint32_t n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 32) * n >> 32);
}

static void say_where() {
    if (running != nullptr) {
        fputs("  kernel ", stderr);
        print_function(running->function);
        fprintf(stderr, " <<<(%u, %u), %u>>>, seed %u\n", running->size.x, running->size.y, running->block.x, settings().seed);
    }
    if (self != nullptr)
        fprintf(stderr, "  CTA (%u, %u), thread %u (warp %u, lane %u)\n", self->block->index.x, self->block->index.y, self->number,
                self->number / WARP, self->lane);
}

void fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    fputs("FAIL emulator: ", stderr);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    say_where();
    end_program();
}

/* ---- Choosing ---- */

/* One of the set bits. */
static uint32_t choose_bit(uint32_t bits) {
    if (!by_chance) return last_first ? 31u - (uint32_t)__builtin_clz(bits) : (uint32_t)__builtin_ctz(bits);
    uint32_t skip = random_below((uint32_t)__builtin_popcount(bits));
    while (skip-- > 0) bits &= bits - 1;
    return (uint32_t)__builtin_ctz(bits);
}

/* The thread of the CTA to go on with; NULL where none is ready. */
static thread *choose_thread(cta &c, const warp *preferred) {
    if (c.ready_warps == 0) return nullptr;
    uint32_t number = preferred != nullptr ? (uint32_t)(preferred - c.warps.data()) : 0;
    if (preferred == nullptr || preferred->ready == 0 || (by_chance && random_below(16) == 0)) number = choose_bit(c.ready_warps);
    warp &w = c.warps[number];
    return w.lanes[choose_bit(w.ready)];
}

static void set_self(thread *t) {
    self = t;
    if (t != nullptr) threadIdx = t->index;
}
static void switch_from(thread *t, thread *next) {
    race_settle();
    set_self(next);
    fiber_switch(t, next);
    set_self(t);
}

/* The running thread stops; it is ready again where somebody says so. */
static void leave_cpu() {
    thread *t = self, *next = choose_thread(*t->block, t->in);
    if (next == t) return;
    switch_from(t, next);
}

static void set_unready(thread &t) {
    t.in->ready &= ~(1u << t.lane);
    if (t.in->ready == 0) t.block->ready_warps &= ~(1u << (t.number / WARP));
}
void make_ready(thread &t) {
    t.waits_in = nullptr;
    t.in->ready |= 1u << t.lane;
    t.block->ready_warps |= 1u << (t.number / WARP);
}

void wait_here(const char *what, const char *file, int line) {
    self->waits_in = what;
    self->file = file;
    self->line = line;
    set_unready(*self);
    leave_cpu();
}

/* A thread that polls is not ready before everybody else of its CTA has had a turn. */
void poll(const char *what) {
    if (++polls > POLLS_MAX) fail("%s: nobody will ever give what is polled for", what);
    self->block->polling++;
    wait_here(POLLS, what, 0);
}

/* Whoever may start now, or has polled for what is there now, may go first. */
void give_way() {
    if (settings().seed == 0) return;
    for (grid *g : resident)
        for (cta *c : g->ctas) c->is_patient = false;
    self->block->giving_way++;
    wait_here(WAY, nullptr, 0);
}

/* ---- Meeting ---- */

const char *name_of(operation kind) {
    static const char *const names[] = { "nothing", "__syncwarp", "a shuffle", "__ballot_sync", "__match_all_sync", "__reduce_sync",
                                         "ldmatrix", "mma", "movmatrix" };
    return names[kind];
}

rendezvous &arrive(operation kind, uint32_t mask, void *mine, const char *file, int line) {
    warp &w = *self->in;
    rendezvous *r = &w.whole;
    if (mask != FULL_MASK) {
        r = nullptr;
        for (rendezvous &part : w.parts)
            if (part.mask == mask) r = &part;
        if (r == nullptr) {
            w.parts.reserve(WARP * 2);
            if (w.parts.size() == WARP * 2) fail("%s at %s:%d: too many masks in one warp", name_of(kind), file, line);
            w.parts.push_back({ mask, 0, NO_OPERATION, {} });
            r = &w.parts.back();
        }
    }
    if ((mask >> self->lane & 1) == 0) fail("%s at %s:%d: the mask %08x is without the lane itself", name_of(kind), file, line, mask);
    if ((mask & ~w.alive) != 0)
        fail("%s at %s:%d: lanes %08x of the mask %08x do not exist or have ended", name_of(kind), file, line, mask & ~w.alive, mask);
    if (r->arrived == 0) r->kind = kind;
    else if (r->kind != kind)
        fail("lanes of a warp disagree: this one is in %s at %s:%d, lanes %08x in %s", name_of(kind), file, line, r->arrived, name_of(r->kind));
    r->brought[self->lane] = mine;
    r->arrived |= 1u << self->lane;
    return *r;
}

void depart(rendezvous &r) {
    warp &w = *self->in;
    polls = 0;
    if (r.kind == SYNCWARP && r.mask == FULL_MASK) w.sync_count++;
    r.arrived = 0;
    for (uint32_t others = r.mask & ~(1u << self->lane); others != 0; others &= others - 1) make_ready(*w.lanes[__builtin_ctz(others)]);
    if (by_chance) leave_cpu();
}

static void open_cta_barrier(cta &c) {
    c.at_barrier = 0;
    c.barrier_count++;
    polls = 0;
    for (thread &t : c.threads)
        if (t.waits_in == WAITS_FOR_CTA) make_ready(t);
}
void cta_barrier(const char *file, int line) {
    cta &c = *self->block;
    if (++c.at_barrier < c.alive) {
        wait_here(WAITS_FOR_CTA, file, line);
        return;
    }
    open_cta_barrier(c);
    if (by_chance) leave_cpu();
}

static uint32_t alive_in(const cluster &k) {
    uint32_t alive = 0;
    for (const cta *c : k.ctas) alive += c->alive;
    return alive;
}
static void open_cluster_barrier(cluster &k) {
    k.arrived = 0;
    k.phase++;
    polls = 0;
    for (cta *c : k.ctas) {
        c->barrier_count++;
        for (thread &t : c->threads)
            if (t.waits_in == WAITS_FOR_CLUSTER) make_ready(t);
    }
}
void cluster_arrive() {
    cluster &k = *self->block->group;
    if (self->cluster_phase == k.phase + 1) fail("arrives at the cluster's barrier twice without waiting");
    self->cluster_phase = k.phase + 1;
    if (++k.arrived == alive_in(k)) open_cluster_barrier(k);
}
void cluster_wait(const char *file, int line) {
    cluster &k = *self->block->group;
    if (self->cluster_phase == 0) fail("waits at the cluster's barrier at %s:%d without arriving", file, line);
    if (self->cluster_phase == k.phase + 1) wait_here(WAITS_FOR_CLUSTER, file, line);
}

/* ---- Launch edges ---- */

void release_dependents() {
    if (!self->block->has_released) running->released++;
    self->block->has_released = true;
    give_way();
}
void wait_for_predecessor() {
    while (running->before != nullptr) wait_here(WAITS_FOR_GRID, nullptr, 0);
}

/* ---- CTAs ---- */

static void thread_main() {
    fiber_begun();
    self->block->has_started = true;
    running->body();
    thread *t = self;
    cta &c = *t->block;
    if (!t->copies.empty()) fail("ends with %zu copies of its own under way", t->copies.size());
    race_settle();
    set_unready(*t);
    t->in->alive &= ~(1u << t->lane);
    t->waits_in = ENDED;
    c.alive--;
    polls = 0;
    for (const rendezvous &r : t->in->parts)
        if (r.arrived != 0 && (r.mask >> t->lane & 1) != 0) fail("ends while lanes %08x of its warp wait for it in %s", r.arrived, name_of(r.kind));
    if (t->in->whole.arrived != 0) fail("ends while lanes %08x of its warp wait for it in %s", t->in->whole.arrived, name_of(t->in->whole.kind));
    if (c.at_barrier > 0 && c.at_barrier == c.alive) open_cta_barrier(c);
    if (c.group->arrived > 0 && c.group->arrived == alive_in(*c.group)) open_cluster_barrier(*c.group);
    thread *next = choose_thread(c, t->in);
    set_self(next);
    fiber_end(t, next);
}

static cta *new_cta(grid &g, uint32_t number, cluster *group, uint32_t rank) {
    cta *c = new cta();
    const uint32_t threads = g.block.x;
    c->of = &g;
    c->index = { number % g.size.x, number / g.size.x % g.size.y, number / g.size.x / g.size.y };
    c->group = group;
    c->rank = rank;
    c->threads.resize(threads);
    c->warps.resize((threads + WARP - 1) / WARP);
    c->alive = threads;
    for (uint32_t i = 0; i < threads; i++) {
        thread &t = c->threads[i];
        warp &w = c->warps[i / WARP];
        t.index = { i, 0, 0 };
        t.block = c;
        t.in = &w;
        t.number = i;
        t.lane = i % WARP;
        t.stack = stack_take();
        fiber_prepare(t, thread_main);
        w.lanes[t.lane] = &t;
        w.alive |= 1u << t.lane;
        make_ready(t);
    }
    for (warp &w : c->warps) w.whole.mask = FULL_MASK;
    shared_begin(*c);
    race_begin(*c);
    return c;
}

static void end_cta(cta *c) {
    grid &g = *c->of;
    self = &c->threads[0];
    shared_end(*c);
    race_end(*c);
    for (thread &t : c->threads) stack_give(t.stack);
    self = nullptr;
    if (!c->has_released) g.released++;
    g.finished++;
}

/* ---- Grids ---- */

static uint32_t cta_count(const grid &g) { return g.size.x * g.size.y * g.size.z; }

static void start_clusters(grid &g) {
    const uint32_t room = 2 * settings().sm_count;
    while (!g.order.empty() && (g.ctas.empty() || g.ctas.size() + g.cluster_size <= room)) {
        const uint32_t first = g.order.back() * g.cluster_size;
        g.order.pop_back();
        cluster *k = new cluster();
        for (uint32_t i = 0; i < g.cluster_size; i++) k->ctas.push_back(new_cta(g, first + i, k, i));
        g.ctas.insert(g.ctas.end(), k->ctas.begin(), k->ctas.end());
        g.started += g.cluster_size;
    }
}

static void start_grid(grid &g, grid *before) {
    const uint32_t clusters = cta_count(g) / g.cluster_size;
    for (uint32_t i = 0; i < clusters; i++) g.order.push_back(is_eager() && !is_random() ? i : clusters - 1 - i);
    g.before = before != nullptr && !before->is_complete ? before : nullptr;
    for (uint32_t i = clusters; is_random() && i > 1; i--) std::swap(g.order[i - 1], g.order[random_below(i)]);
    resident.push_back(&g);
}

/* Clusters all of whose CTAs ended go; a grid whose CTAs all ended is complete. */
static void reap(grid &g) {
    for (size_t i = 0; i < g.ctas.size();) {
        cluster *k = g.ctas[i]->group;
        if (g.ctas[i]->rank != 0 || alive_in(*k) > 0) {
            i++;
            continue;
        }
        running = &g;
        for (cta *c : k->ctas) {
            end_cta(c);
            g.ctas.erase(std::find(g.ctas.begin(), g.ctas.end(), c));
            delete c;
        }
        delete k;
    }
    g.is_complete = g.finished == cta_count(g);
}

static void wake_successors() {
    while (!resident.empty()) {
        auto done = std::find_if(resident.begin(), resident.end(), [](grid *g) { return g->is_complete; });
        if (done == resident.end()) return;
        for (grid *g : resident) {
            if (g->before != *done) continue;
            g->before = nullptr;
            for (cta *c : g->ctas)
                for (thread &t : c->threads)
                    if (t.waits_in == WAITS_FOR_GRID) make_ready(t);
        }
        resident.erase(done);
    }
}

static void run_cta(cta &c) {
    thread *next = choose_thread(c, nullptr);
    running = c.of;
    blockIdx = c.index;
    blockDim = running->block;
    gridDim = running->size;
    shared_enter(c);
    set_self(next);
    fiber_switch(nullptr, next);
    set_self(nullptr);
    shared_leave(c);
    c.is_patient = c.polling > 0;
    if (c.polling == 0 && c.giving_way == 0) return;
    c.polling = c.giving_way = 0;
    for (thread &t : c.threads)
        if (t.waits_in == POLLS || t.waits_in == WAY) make_ready(t);
}

[[noreturn]] static void report_deadlock() {
    self = nullptr;
    fputs("FAIL emulator: everybody waits\n", stderr);
    for (grid *g : resident) {
        running = g;
        say_where();
        int shown = 0;
        for (const cta *c : g->ctas)
            for (size_t i = 0; i < c->threads.size() && shown < 24; i++) {
                const thread &t = c->threads[i];
                size_t last = i;
                while (last + 1 < c->threads.size() && c->threads[last + 1].waits_in == t.waits_in && c->threads[last + 1].line == t.line) last++;
                if (c->alive > 0 && shown++ < 24)
                    fprintf(stderr, "  CTA (%u, %u), threads %zu to %zu: %s%s%s:%d\n", c->index.x, c->index.y, i, last, t.waits_in != nullptr ? t.waits_in : "ready",
                            t.file != nullptr ? " at " : "", t.file != nullptr ? t.file : "", t.line);
                i = last;
            }
    }
    end_program();
}

/* A CTA with something to do, by the seed's order; those that only ask again come after all others. */
static cta *choose_cta() {
    std::vector<cta *> ready, patient;
    for (grid *g : resident)
        for (cta *c : g->ctas)
            if (c->ready_warps != 0) (c->is_patient ? patient : ready).push_back(c);
    if (ready.empty()) {
        ready.swap(patient);
        for (cta *c : ready) c->is_patient = false;
    }
    if (ready.empty()) return nullptr;
    if (is_random()) return ready[random_below((uint32_t)ready.size())];
    if (!is_eager()) return ready.front();
    for (size_t i = ready.size(); i-- > 0;)
        if (!ready[i]->has_released) return ready[i];        /* successors wait for it */
    return ready.back();
}

/* A grid with a programmatic edge starts once every CTA of the one before it has let it, any other once nothing runs. */
static bool may_start(const grid &g, const grid *before) {
    if (resident.empty()) return true;
    return g.is_programmatic && resident.size() < settings().window && before->released == cta_count(*before);
}

void run(std::deque<grid> &queue) {
    size_t next = 0;
    polls = 0;
    while (next < queue.size() || !resident.empty()) {
        for (; next < queue.size() && may_start(queue[next], next > 0 ? &queue[next - 1] : nullptr); next++)
            start_grid(queue[next], next > 0 ? &queue[next - 1] : nullptr);
        for (grid *g : resident) start_clusters(*g);
        cta *c = choose_cta();
        if (c == nullptr) report_deadlock();
        grid &g = *c->of;
        run_cta(*c);
        if (alive_in(*c->group) == 0) reap(g);
        wake_successors();
    }
}

} // namespace emulator
