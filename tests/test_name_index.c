/* tests/test_name_index.c - hashes of what comes from files: a file of keys that all meet in one place under a known seed took 20 s to
 * open.  So the seed is another one in every process, and every table follows it. */
#include "formats/name_index.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include "runtime/tokenizer_internal.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

enum { NAME_COUNT = 256, NAME_SLOTS = 512, STRING_SLOTS = 1024, MERGE_SLOTS = 1024 };

static char names[NAME_COUNT][16];

static spk_text name_of(const void *items, uint64_t index) {
    (void)items;
    return (spk_text){ names[index], strlen(names[index]) };
}

/* What one process sees: its seed, and which slots of each table are taken by what. */
typedef struct {
    uint64_t seed, duplicate;
    uint32_t name_slots[NAME_SLOTS], string_slots[STRING_SLOTS];
    uint64_t merge_slots[MERGE_SLOTS];
    bool     is_good;
} view;

/* 256 merges of one byte with each byte. */
static void fill_merges(spk_bpe *bpe, view *v) {
    gguf_build list = { 0 };
    spk_error err;
    char buffer[16], line[16];
    spk_bpe_init(bpe);
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t code = 0x21 + i % 94;
        gb_string(&list, (snprintf(line, sizeof line, "%c %c", (int)('!' + i / 94), (int)code), line));
    }
    const spk_kv merges = { .type = SPK_KV_ARRAY, .element_type = SPK_KV_STRING, .count = 256, .value = list.bytes, .value_bytes = list.size };
    v->is_good &= spk_bpe_add_merges(bpe, &merges, buffer, &err) == SPK_OK && bpe->slot_count == MERGE_SLOTS;
    for (uint64_t i = 0; v->is_good && i < MERGE_SLOTS; i++) v->merge_slots[i] = bpe->slots[i].rank == UINT32_MAX ? 0 : bpe->slots[i].pair + 1;
    spk_bpe_free(bpe);
    gb_free(&list);
}

static void look(view *v) {
    uint32_t *slots = NULL;
    uint64_t slot_count = 0;
    spk_error err;
    spk_strings strings = { 0 };
    static spk_bpe bpe;
    v->seed = spk_hash_seed();
    v->is_good = spk_name_index_build(NULL, NAME_COUNT, name_of, "x", &slots, &slot_count, &v->duplicate, &err) == SPK_OK &&
                 slot_count == NAME_SLOTS && v->seed == spk_hash_seed();
    if (v->is_good) memcpy(v->name_slots, slots, sizeof v->name_slots);
    for (uint32_t i = 0; i < NAME_COUNT; i++) {
        v->is_good &= spk_name_index_find(slots, slot_count, NULL, name_of, name_of(NULL, i)) == i;
        v->is_good &= spk_strings_add(&strings, names[i], strlen(names[i]), true, &err) == SPK_OK;
    }
    for (uint32_t i = 0; i < NAME_COUNT; i++) v->is_good &= spk_strings_find(&strings, names[i], strlen(names[i])) == i;
    v->is_good &= strings.slot_count == STRING_SLOTS;
    for (uint64_t i = 0; v->is_good && i < STRING_SLOTS; i++) v->string_slots[i] = strings.slots[i].index_plus_1;
    spk_strings_free(&strings);
    free(slots);
    fill_merges(&bpe, v);
}

/* A process that has hashed nothing yet. */
static view look_elsewhere(void) {
    static view v;
    int ends[2], status = -1;
    memset(&v, 0, sizeof v);
    CHECK(pipe(ends) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        look(&v);
        _exit(write(ends[1], &v, sizeof v) == (ssize_t)sizeof v ? 0 : 1);        /* less than a pipe holds */
    }
    CHECK(child > 0 && read(ends[0], &v, sizeof v) == (ssize_t)sizeof v, "no view");
    CHECK(waitpid(child, &status, 0) == child && status == 0, "status %d", status);
    (void)close(ends[0]);
    (void)close(ends[1]);
    return v;
}

static view a, b;

static void every_process_has_a_seed_of_its_own(void) {
    CHECK(sizeof(view) < 65536, "fits into a pipe");
    for (uint32_t i = 0; i < NAME_COUNT; i++) (void)snprintf(names[i], sizeof names[i], "blk.%u.name", (unsigned)i);
    a = look_elsewhere();
    b = look_elsewhere();
    CHECK(a.is_good && b.is_good && a.duplicate == SPK_NAME_NONE && b.duplicate == SPK_NAME_NONE, "tables are built");
    CHECK(a.seed != b.seed && a.seed != 0 && b.seed != 0, "seeds %#llx and %#llx", (unsigned long long)a.seed, (unsigned long long)b.seed);
}

/* Would one of the tables ignore the seed, it would be the same in both. */
static void every_table_follows_the_seed(void) {
    uint32_t names_moved = 0, strings_moved = 0, merges_moved = 0;
    for (uint32_t i = 0; i < NAME_SLOTS; i++) names_moved += a.name_slots[i] != b.name_slots[i];
    for (uint32_t i = 0; i < STRING_SLOTS; i++) strings_moved += a.string_slots[i] != b.string_slots[i];
    for (uint32_t i = 0; i < MERGE_SLOTS; i++) merges_moved += a.merge_slots[i] != b.merge_slots[i];
    CHECK(names_moved > NAME_COUNT, "names: %u slots differ", (unsigned)names_moved);
    CHECK(strings_moved > NAME_COUNT, "strings of a tokenizer: %u slots differ", (unsigned)strings_moved);
    CHECK(merges_moved > NAME_COUNT, "merges of a tokenizer: %u slots differ", (unsigned)merges_moved);
}

/* The longest run of slots that are taken: what a search may have to pass. */
static uint64_t longest_run(const uint32_t *slots, uint64_t count) {
    uint64_t longest = 0, run = 0;
    for (uint64_t i = 0; i < 2 * count; i++) {
        run = slots[i % count] != 0 ? run + 1 : 0;
        if (run > longest) longest = run;
    }
    return longest;
}

/* Names that all have one slot for a process's seed: there they stand in one run, elsewhere they are strewn about. */
static void keys_made_for_one_seed_are_harmless_under_another(void) {
    for (uint64_t number = 0, count = 0; count < NAME_COUNT; number++) {
        char name[16];
        int size = snprintf(name, sizeof name, "k%llu", (unsigned long long)number);
        if ((XXH3_64bits_withSeed(name, (size_t)size, a.seed) & (NAME_SLOTS - 1)) == 100) memcpy(names[count++], name, sizeof name);
    }
    view other = look_elsewhere();
    uint32_t at_home[NAME_SLOTS] = { 0 };
    for (uint32_t i = 0; i < NAME_COUNT; i++) at_home[(100 + i) % NAME_SLOTS] = i + 1;
    CHECK(longest_run(at_home, NAME_SLOTS) == NAME_COUNT, "%u", (unsigned)longest_run(at_home, NAME_SLOTS));
    CHECK(other.is_good && longest_run(other.name_slots, NAME_SLOTS) < NAME_COUNT / 2, "a run of %u", (unsigned)longest_run(other.name_slots, NAME_SLOTS));
}

/* A byte as the alphabet of merges writes it; returns the size. */
static int write_byte(const spk_bpe *bpe, unsigned byte, char *out) {
    unsigned code = 1;
    while (bpe->byte_of[code] != byte || (byte == 0 && code != 256)) code++;
    if (code >= 0x80) *out++ = (char)(0xC0 | code >> 6);
    *out = (char)(code < 0x80 ? code : 0x80 | (code & 0x3F));
    return code < 0x80 ? 1 : 2;
}

/* Merges that met in a quarter of the slots under the fixed hash that pairs once had, and so stood in one run: to find them took time
 * that grows with the square of their number. */
static void merges_made_for_a_known_hash_are_strewn_about(void) {
    enum { SLOT_COUNT = 32768, WANTED = SLOT_COUNT / 2 };
    gguf_build list = { 0 };
    spk_error err;
    char buffer[16], line[16];
    static spk_bpe bpe;
    uint64_t count = 0;
    spk_bpe_init(&bpe);
    for (uint64_t left = 0; left < 256; left++)
        for (uint64_t right = 0; right < 256 && count < WANTED; right++) {
            if ((((left << 32 | right) * UINT64_C(0x9E3779B97F4A7C15)) >> 24 & (SLOT_COUNT - 1)) >= SLOT_COUNT / 4) continue;
            int size = write_byte(&bpe, (unsigned)left, line);
            line[size++] = ' ';
            line[size + write_byte(&bpe, (unsigned)right, line + size)] = '\0';
            gb_string(&list, line);
            count++;
        }
    CHECK(count > WANTED - 1000, "%u merges", (unsigned)count);
    const spk_kv merges = { .type = SPK_KV_ARRAY, .element_type = SPK_KV_STRING, .count = count, .value = list.bytes, .value_bytes = list.size };
    CHECK(spk_bpe_add_merges(&bpe, &merges, buffer, &err) == SPK_OK, "%s", err.text);
    CHECK(bpe.slot_count == SLOT_COUNT, "%u slots", (unsigned)bpe.slot_count);
    uint32_t *taken = calloc(bpe.slot_count, sizeof *taken), taken_count = 0;
    for (uint64_t i = 0; i < bpe.slot_count; i++) taken_count += taken[i] = bpe.slots[i].rank != UINT32_MAX;
    CHECK(taken_count == count, "%u of %u are there", (unsigned)taken_count, (unsigned)count);
    CHECK(longest_run(taken, bpe.slot_count) < 1000, "a run of %u", (unsigned)longest_run(taken, bpe.slot_count));
    free(taken);
    spk_bpe_free(&bpe);
    gb_free(&list);
}

int main(void) {
    RUN(every_process_has_a_seed_of_its_own);
    RUN(every_table_follows_the_seed);
    RUN(keys_made_for_one_seed_are_harmless_under_another);
    RUN(merges_made_for_a_known_hash_are_strewn_about);
    return CHECK_EXIT();
}
