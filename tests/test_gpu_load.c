/* tests/test_gpu_load.c - the pipeline that fills a GPU, with a device of its own: memory whose copies happen as late as they
 * may, so that a buffer that is used again too early, or unpinned too early, is found. */
#include "runtime/gpu_load_internal.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include "tests/check.h"
#include "tests/spk_build.h"

/* ---- A device ---- */

enum { SLOT_MAX = 64, PIN_MAX = 128, PAGE = 4096, CHUNK = SPK_CHUNK_BYTES };

typedef struct { const uint8_t *from; uint8_t *to; uint64_t size_bytes; bool is_busy; } pending_copy;
typedef struct { const uint8_t *at; uint64_t size_bytes; } pinned_range;

typedef struct {
    pthread_mutex_t lock;
    uint8_t     *memory;                 /* "on the device" */
    uint8_t     *arrivals;               /* of each byte */
    uint64_t     size_bytes, seed;
    pending_copy copies[SLOT_MAX];
    pinned_range pins[PIN_MAX];
    uint32_t     pin_count, start_count, wait_count;
    bool         refuses_mappings, refuses_all;
    uint32_t     failing_start, failing_wait;   /* which call; 0: none */
    const char  *fault;                  /* what the loader did wrong */
} device;

static bool holds(const pinned_range *p, const uint8_t *at, uint64_t size_bytes) {
    return at >= p->at && at + size_bytes <= p->at + p->size_bytes;
}

static bool is_pinned(const device *d, const uint8_t *at, uint64_t size_bytes) {
    for (uint32_t i = 0; i < d->pin_count; i++)
        if (holds(&d->pins[i], at, size_bytes)) return true;
    return false;
}

static void dawdle(device *d) {
    (void)pthread_mutex_lock(&d->lock);
    struct timespec pause = { .tv_nsec = (long)(check_random(&d->seed) % 100000) };
    (void)pthread_mutex_unlock(&d->lock);
    (void)nanosleep(&pause, NULL);
}

static bool device_pin(void *context, const void *memory, uint64_t size_bytes, bool is_host_writing) {
    device *d = context;
    bool taken = !d->refuses_all && !(d->refuses_mappings && !is_host_writing);
    dawdle(d);
    (void)pthread_mutex_lock(&d->lock);
    if ((uintptr_t)memory % PAGE != 0) d->fault = "pins what is not page-aligned";
    if (is_pinned(d, memory, 1)) d->fault = "pins twice";
    if (d->pin_count == PIN_MAX) d->fault = "pins too much";
    if (taken && d->fault == NULL) d->pins[d->pin_count++] = (pinned_range){ memory, size_bytes };
    (void)pthread_mutex_unlock(&d->lock);
    return taken;
}

static void device_unpin(void *context, const void *memory) {
    device *d = context;
    uint32_t i = 0;
    (void)pthread_mutex_lock(&d->lock);
    while (i < d->pin_count && d->pins[i].at != memory) i++;
    if (i == d->pin_count) {
        d->fault = "unpins what is not pinned";
    } else {
        for (uint32_t s = 0; s < SLOT_MAX; s++)
            if (d->copies[s].is_busy && holds(&d->pins[i], d->copies[s].from, 1)) d->fault = "unpins what is being copied";
        d->pins[i] = d->pins[--d->pin_count];
    }
    (void)pthread_mutex_unlock(&d->lock);
}

static spk_status device_start(void *context, uint32_t slot, void *d_to, const void *from, uint64_t size_bytes, spk_error *err) {
    device *d = context;
    dawdle(d);
    (void)pthread_mutex_lock(&d->lock);
    bool is_failing = ++d->start_count == d->failing_start;
    if (slot >= SLOT_MAX || d->copies[slot].is_busy) d->fault = "starts a copy in a busy slot";
    else if (!is_failing) d->copies[slot] = (pending_copy){ from, d_to, size_bytes, true };
    if (!d->refuses_all && !is_pinned(d, from, size_bytes)) d->fault = "copies what is not pinned";
    (void)pthread_mutex_unlock(&d->lock);
    return is_failing ? spk_fail(err, SPK_E_IO, "start %u", d->failing_start) : SPK_OK;
}

static spk_status device_wait(void *context, uint32_t slot, spk_error *err) {
    device *d = context;
    dawdle(d);
    (void)pthread_mutex_lock(&d->lock);
    pending_copy *c = &d->copies[slot];
    bool is_failing = ++d->wait_count == d->failing_wait;
    uint64_t at = (uint64_t)(c->to - d->memory);
    if (!c->is_busy) d->fault = "waits for nothing";
    else if (c->to < d->memory || at > d->size_bytes || c->size_bytes > d->size_bytes - at) d->fault = "copies past the end";
    else if (!d->refuses_all && !is_pinned(d, c->from, c->size_bytes)) d->fault = "unpinned too early";
    if (d->fault == NULL) {
        memcpy(c->to, c->from, c->size_bytes);
        uint8_t *arrivals = d->arrivals + at;
        for (uint64_t i = 0, size = c->size_bytes; i < size; i++) arrivals[i]++;
    }
    c->is_busy = false;
    (void)pthread_mutex_unlock(&d->lock);
    return is_failing ? spk_fail(err, SPK_E_IO, "wait %u", d->failing_wait) : SPK_OK;
}

static device device_of(uint64_t size_bytes) {
    device d = { .lock = PTHREAD_MUTEX_INITIALIZER, .size_bytes = size_bytes, .seed = 3, .memory = malloc(size_bytes + 1),
                 .arrivals = calloc(1, size_bytes + 1) };
    memset(d.memory, 0xa5, size_bytes + 1);
    return d;
}

static void device_free(device *d) {
    free(d->memory);
    free(d->arrivals);
}

/* ---- What is loaded ---- */

/* Sections of odd sizes: more than a piece, less than a page's worth of chunks, one that ends with a short chunk. */
static const model odd_model = { { (13 << 20) + PAGE, 24576, 5 << 20, PAGE }, model_tensors, TENSOR_COUNT };

typedef struct { uint64_t done_bytes, calls; pthread_t caller; bool is_bad; } watch;

static void watch_progress(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    watch *w = context;
    w->is_bad |= done_bytes <= w->done_bytes || done_bytes > total_bytes || !pthread_equal(pthread_self(), w->caller);
    w->done_bytes = done_bytes;
    w->calls++;
}

/* All sections of the pack, one after another, by the plan; the device must be left quiet, and unharmed where it went well. */
static spk_status load_pack(const spk_pack *pack, const spk_load_plan *plan, device *d, uint64_t *way_bytes, spk_error *error) {
    spk_transfer transfer = { .context = d, .pin = device_pin, .unpin = device_unpin, .start = device_start,
                              .wait = device_wait };
    spk_load_range ranges[SPK_PLACE_COUNT];
    watch w = { .caller = pthread_self() };
    uint64_t at = 0;
    for (uint32_t s = 0; s < SPK_PLACE_COUNT; s++) {
        ranges[s] = (spk_load_range){ .d_to = d->memory + at, .place = s + 1 };
        ranges[s].bytes = spk_pack_section(pack, s + 1, &ranges[s].size_bytes);
        at += ranges[s].size_bytes;
    }
    spk_load_job job = { .pack = pack, .ranges = ranges, .range_count = SPK_PLACE_COUNT, .transfer = &transfer,
                         .progress = watch_progress, .progress_context = &w };
    *error = (spk_error){ 0 };
    spk_status status = spk_load_run(&job, plan, way_bytes, error);
    CHECK(d->fault == NULL, "the loader %s", d->fault);
    CHECK(d->pin_count == 0, "%u ranges left pinned", d->pin_count);
    for (uint32_t s = 0; s < SLOT_MAX; s++) CHECK(!d->copies[s].is_busy, "slot %u left busy", s);
    CHECK(!w.is_bad, "progress");
    if (status == SPK_OK) CHECK(w.done_bytes == at && w.calls > 0, "progress ends at %u of %u", (unsigned)w.done_bytes, (unsigned)at);
    return status;
}

static void check_arrived(const device *d, const uint8_t *expected, const char *what) {
    CHECK(memcmp(d->memory, expected, d->size_bytes) == 0, "%s: other bytes", what);
    for (uint64_t i = 0; i < d->size_bytes; i++)
        if (d->arrivals[i] != 1) {
            CHECK(d->arrivals[i] == 1, "%s: byte %u arrived %u times", what, (unsigned)i, d->arrivals[i]);
            break;
        }
    CHECK(d->memory[d->size_bytes] == 0xa5, "%s: past the end", what);
}

static uint64_t bytes_of(const model *m) {
    uint64_t total = 0;
    for (int s = 0; s < SPK_PLACE_COUNT; s++) total += m->section_bytes[s];
    return total;
}

static spk_pack *open_pack(void) {
    spk_error error = { 0 };
    spk_pack *pack = NULL;
    CHECK_OK(spk_pack_open(pack_path, &pack, &error), error);
    return pack;
}

static const char *const way_names[SPK_LOAD_WAY_COUNT] = { "pinned", "read", "direct", "memory" };
static const uint32_t thread_counts[] = { 1, 2, 3, 5, 16 };
enum { THREAD_COUNTS = sizeof thread_counts / sizeof *thread_counts };

static spk_load_plan plan_of(int way, uint32_t threads, uint32_t slots, uint64_t piece_chunks, uint64_t buffer_chunks) {
    return (spk_load_plan){ .cached_way = (spk_load_way)way, .uncached_way = (spk_load_way)way, .thread_count = threads,
                            .slots_per_thread = slots, .piece_bytes = piece_chunks * CHUNK,
                            .buffer_bytes = buffer_chunks * CHUNK };
}

/* ---- Tests ---- */

static void load_in_every_way(const model *m) {
    uint8_t *expected = write_model(pack_path, m, 1 << 20);
    spk_pack *pack = open_pack();
    for (int way = 0; pack != NULL && way < SPK_LOAD_WAY_COUNT; way++)
        for (int t = 0; t < THREAD_COUNTS; t++) {
            device d = device_of(bytes_of(m));
            spk_load_plan plan = plan_of(way, thread_counts[t], 1 + (uint32_t)t % 3, 1 + (uint64_t)(way + t) % 4, 1 + (uint64_t)t % 2);
            uint64_t way_bytes[SPK_LOAD_WAY_COUNT], sum = 0;
            spk_error error;
            char what[80];
            (void)snprintf(what, sizeof what, "%s, %u threads", way_names[way], thread_counts[t]);
            CHECK_OK(load_pack(pack, &plan, &d, way_bytes, &error), error);
            check_arrived(&d, expected, what);
            for (int w = 0; w < SPK_LOAD_WAY_COUNT; w++) sum += way_bytes[w];
            CHECK(sum == d.size_bytes, "%s: %u bytes counted", what, (unsigned)sum);
            if (way != SPK_LOAD_DIRECT) CHECK(way_bytes[way] == d.size_bytes, "%s: went another way", what);
            device_free(&d);
        }
    spk_pack_close(pack);
    free(expected);
}

static void every_byte_arrives_once(void) {
    load_in_every_way(&odd_model);
    load_in_every_way(&small_model);
}

static void flip(uint64_t offset) {
    int fd = open(pack_path, O_RDWR);
    uint8_t byte = 0;
    CHECK(pread(fd, &byte, 1, (off_t)offset) == 1, "read");
    byte ^= 0x10;
    CHECK(pwrite(fd, &byte, 1, (off_t)offset) == 1 && close(fd) == 0, "write");
}

/* Chunks 3 of STATIC and 1 of EMBEDDING are damaged: the first is reported, in verify's words. */
static void the_first_bad_chunk_is_named(void) {
    free(write_model(pack_path, &odd_model, 1 << 20));
    spk_pack *pack = open_pack();
    if (pack == NULL) return;
    flip(spk_pack_section_file_offset(pack, SPK_PLACE_STATIC) + 3 * CHUNK + 1000001);
    flip(spk_pack_section_file_offset(pack, SPK_PLACE_EMBEDDING) + CHUNK + 77);
    spk_error expected, error;
    CHECK(spk_pack_verify(pack, 2, NULL, NULL, &expected) == SPK_E_CHECKSUM, "verify");
    CHECK(strstr(expected.text, "chunk 3 of section STATIC") != NULL, "%s", expected.text);
    for (int way = 0; way < SPK_LOAD_WAY_COUNT; way++)
        for (int t = 0; t < THREAD_COUNTS; t++) {
            device d = device_of(bytes_of(&odd_model));
            spk_load_plan plan = plan_of(way, thread_counts[t], 2, 1 + (uint64_t)t, 1);
            CHECK(load_pack(pack, &plan, &d, NULL, &error) == SPK_E_CHECKSUM && strcmp(error.text, expected.text) == 0,
                  "%s, %u threads: %s", way_names[way], thread_counts[t], error.text);
            device_free(&d);
        }
    spk_pack_close(pack);
}

/* The last byte of each section, and of each chunk, is covered too. */
static void every_chunk_is_checked(void) {
    free(write_model(pack_path, &odd_model, 1 << 20));
    spk_pack *pack = open_pack();
    if (pack == NULL) return;
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t size_bytes, section = spk_pack_section_file_offset(pack, place);
        (void)spk_pack_section(pack, place, &size_bytes);
        for (uint64_t chunk = 0; chunk * CHUNK < size_bytes; chunk++) {
            uint64_t end = (chunk + 1) * CHUNK < size_bytes ? (chunk + 1) * CHUNK : size_bytes;
            spk_error expected, error;
            flip(section + end - 1);
            CHECK(spk_pack_verify(pack, 1, NULL, NULL, &expected) == SPK_E_CHECKSUM, "verify");
            device d = device_of(bytes_of(&odd_model));
            spk_load_plan plan = plan_of(chunk % 2 ? SPK_LOAD_PINNED : SPK_LOAD_READ, 3, 2, 2, 2);
            CHECK(load_pack(pack, &plan, &d, NULL, &error) == SPK_E_CHECKSUM && strcmp(error.text, expected.text) == 0,
                  "%s: %s", expected.text, error.text);
            device_free(&d);
            flip(section + end - 1);
        }
    }
    spk_pack_close(pack);
}

static void a_file_that_shrinks_is_an_error(void) {
    free(write_model(pack_path, &odd_model, 1 << 20));
    spk_pack *pack = open_pack();
    if (pack == NULL) return;
    uint64_t cut = spk_pack_section_file_offset(pack, SPK_PLACE_EMBEDDING) + CHUNK + 5000;
    CHECK(truncate(pack_path, (off_t)cut) == 0, "truncate");
    for (int way = SPK_LOAD_PINNED; way <= SPK_LOAD_DIRECT; way++) {
        device d = device_of(bytes_of(&odd_model));
        d.refuses_mappings = true;       /* as the system refuses to pin pages that are gone */
        spk_load_plan plan = plan_of(way, 3, 2, 1, 1);
        spk_error error;
        CHECK(load_pack(pack, &plan, &d, NULL, &error) == SPK_E_CORRUPT && strstr(error.text, "R5: truncated") != NULL,
              "%s: %s", way_names[way], error.text);
        device_free(&d);
    }
    spk_pack_close(pack);
}

/* Each of the eight copies, and each wait, fails once. */
static void a_failing_copy_ends_the_load(void) {
    free(write_model(pack_path, &odd_model, 1 << 20));
    spk_pack *pack = open_pack();
    for (int way = 0; pack != NULL && way < SPK_LOAD_WAY_COUNT; way++)
        for (uint32_t n = 1; n <= 8; n++)
            for (int is_wait = 0; is_wait < 2; is_wait++) {
                device d = device_of(bytes_of(&odd_model));
                if (is_wait) d.failing_wait = n; else d.failing_start = n;
                spk_load_plan plan = plan_of(way, 1 + n % 4, 1 + n % 3, 1, 1);
                spk_error error;
                char expected[32];
                (void)snprintf(expected, sizeof expected, "%s %u", is_wait ? "wait" : "start", n);
                CHECK(load_pack(pack, &plan, &d, NULL, &error) == SPK_E_IO && strcmp(error.text, expected) == 0,
                      "%s, %s: %s", way_names[way], expected, error.text);
                device_free(&d);
            }
    spk_pack_close(pack);
}

static void refused_pins_fall_back_to_reading(void) {
    uint8_t *expected = write_model(pack_path, &odd_model, 1 << 20);
    spk_pack *pack = open_pack();
    for (int all = 0; pack != NULL && all < 2; all++) {
        device d = device_of(bytes_of(&odd_model));
        d.refuses_mappings = true;
        d.refuses_all = all != 0;        /* buffers too: slower, but right */
        spk_load_plan plan = plan_of(SPK_LOAD_PINNED, 4, 2, 2, 1);
        uint64_t way_bytes[SPK_LOAD_WAY_COUNT];
        spk_error error;
        CHECK_OK(load_pack(pack, &plan, &d, way_bytes, &error), error);
        check_arrived(&d, expected, "refused");
        CHECK(way_bytes[SPK_LOAD_READ] == d.size_bytes, "read %u bytes", (unsigned)way_bytes[SPK_LOAD_READ]);
        device_free(&d);
    }
    spk_pack_close(pack);
    free(expected);
}

/* A GGUF laid out in memory: no file, no checksums, any size. */
static void plain_memory_is_loaded(void) {
    static const uint64_t sizes[] = { 1, PAGE, CHUNK - 1, CHUNK, 3 * CHUNK + 12345 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int way = 0; way < SPK_LOAD_WAY_COUNT; way++) {
            uint8_t *bytes = aligned_alloc(PAGE, 4 * CHUNK), *random = random_bytes(sizes[i], i);
            memcpy(bytes, random, sizes[i]);
            device d = device_of(sizes[i]);
            d.refuses_mappings = i % 2 == 1;
            spk_transfer transfer = { &d, device_pin, device_unpin, device_start, device_wait, NULL };
            spk_load_range range = { .bytes = bytes, .size_bytes = sizes[i], .d_to = d.memory };
            spk_load_job job = { .ranges = &range, .range_count = 1, .transfer = &transfer };
            spk_load_plan plan = plan_of(way, 3, 2, 1, 1);
            uint64_t way_bytes[SPK_LOAD_WAY_COUNT];
            spk_error error = { 0 };
            CHECK_OK(spk_load_run(&job, &plan, way_bytes, &error), error);
            check_arrived(&d, random, way_names[way]);
            bool is_pinned_way = way == SPK_LOAD_PINNED && !d.refuses_mappings;
            CHECK(way_bytes[is_pinned_way ? SPK_LOAD_PINNED : SPK_LOAD_MEMORY] == sizes[i] || way == SPK_LOAD_DIRECT, "%s",
                  way_names[way]);
            CHECK(d.fault == NULL && d.pin_count == 0, "the loader %s", d.fault);
            CHECK(memcmp(bytes, random, sizes[i]) == 0, "the memory itself was changed");
            device_free(&d);
            free(bytes);
            free(random);
        }
}

/* Whether a page is in the page cache. */
static bool is_resident(const uint8_t *page) {
    unsigned char in = 1;
    return mincore((void *)(uintptr_t)page, PAGE, &in) != 0 || (in & 1) != 0;
}

/* What is not in the page cache is read past it, and what is, is not.  Opening reads ahead into the first piece. */
static void uncached_pieces_are_read_directly(void) {
    uint8_t *expected = write_model(pack_path, &odd_model, 1 << 20);
    int fd = open(pack_path, O_RDONLY), direct = open(pack_path, O_RDONLY | O_DIRECT);
    CHECK(fd >= 0 && fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0, "drop from the page cache");
    spk_pack *pack = open_pack();
    uint64_t size_bytes;
    const uint8_t *bytes = pack != NULL ? spk_pack_section(pack, SPK_PLACE_STATIC, &size_bytes) : NULL;
    if (direct < 0 || bytes == NULL || is_resident(bytes + 2 * CHUNK) || is_resident(bytes + 9 * CHUNK / 4)) {
        SKIP("this file system cannot drop pages, or not read past the page cache");
    } else {
        CHECK(madvise((void *)(uintptr_t)bytes, size_bytes, MADV_RANDOM) == 0, "no reading ahead");
        for (uint64_t at = CHUNK; at < 2 * CHUNK; at += PAGE) (void)*(const volatile uint8_t *)(bytes + at);
        device d = device_of(bytes_of(&odd_model));
        spk_load_plan plan = plan_of(SPK_LOAD_PINNED, 2, 2, 1, 1);
        plan.uncached_way = SPK_LOAD_DIRECT;
        uint64_t way_bytes[SPK_LOAD_WAY_COUNT];
        spk_error error;
        CHECK_OK(load_pack(pack, &plan, &d, way_bytes, &error), error);
        check_arrived(&d, expected, "uncached");
        CHECK(way_bytes[SPK_LOAD_PINNED] >= CHUNK && way_bytes[SPK_LOAD_DIRECT] >= 2 * CHUNK,
              "pinned %u, direct %u", (unsigned)way_bytes[SPK_LOAD_PINNED], (unsigned)way_bytes[SPK_LOAD_DIRECT]);
        CHECK(way_bytes[SPK_LOAD_READ] == 0, "read %u", (unsigned)way_bytes[SPK_LOAD_READ]);
        CHECK(!is_resident(bytes + 9 * CHUNK / 4), "direct reads leave the page cache as it is");
        device_free(&d);
    }
    spk_pack_close(pack);
    if (direct >= 0) (void)close(direct);
    (void)close(fd);
    free(expected);
}

int main(void) {
    if (!open_folder()) return 1;
    RUN(every_byte_arrives_once);
    RUN(the_first_bad_chunk_is_named);
    RUN(every_chunk_is_checked);
    RUN(a_file_that_shrinks_is_an_error);
    RUN(a_failing_copy_ends_the_load);
    RUN(refused_pins_fall_back_to_reading);
    RUN(plain_memory_is_loaded);
    RUN(uncached_pieces_are_read_directly);
    close_folder();
    return CHECK_EXIT();
}
