/* tests/test_spk.c - the .spk pack: what the writer writes, what the reader gives back, what verify finds. */
#include "formats/spk_internal.h"
#include "formats/outfile.h"

#include <math.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "tests/check.h"
#include "tests/spk_build.h"

static void check_texts(const spk_provenance *p) {
    CHECK(strcmp(p->source_name, model_provenance.source_name) == 0, "%s", p->source_name);
    CHECK(strcmp(p->recipe_name, model_provenance.recipe_name) == 0, "%s", p->recipe_name);
    CHECK(strcmp(p->recipe_text, model_provenance.recipe_text) == 0, "%s", p->recipe_text);
    CHECK(strcmp(p->imatrix_name, "") == 0, "%s", p->imatrix_name);
    CHECK(strcmp(p->tool_version, model_provenance.tool_version) == 0, "%s", p->tool_version);
    CHECK(strcmp(p->weights_name, model_provenance.weights_name) == 0, "%s", p->weights_name);
    CHECK(p->weights_bytes == model_provenance.weights_bytes &&
          memcmp(&p->weights_digest, &model_provenance.weights_digest, sizeof p->weights_digest) == 0, "numbers");
    CHECK(p->source_bytes == model_provenance.source_bytes && p->source_version == 3, "numbers");
    CHECK(p->source_alignment_bytes == 64 &&
          memcmp(&p->source_digest, &model_provenance.source_digest, sizeof p->source_digest) == 0, "numbers");
}

static void reads_back_what_was_written(void) {
    uint8_t *data = write_model(pack_path, &small_model, 1000), *expected = data;
    spk_error error = { 0 };
    spk_pack *pack = NULL;
    CHECK_OK(spk_pack_open(pack_path, &pack, &error), error);
    if (pack == NULL) return;
    CHECK(memcmp(spk_pack_config(pack), &model_config, sizeof model_config) == 0, "config");
    CHECK(spk_pack_tensor_count(pack) == TENSOR_COUNT, "count");
    for (int i = 0; i < TENSOR_COUNT; i++)
        CHECK(memcmp(&spk_pack_tensors(pack)[i], &model_tensors[i], sizeof(spk_tensor)) == 0, "tensor %d", i);
    const spk_kv_set *kvs = spk_pack_kvs(pack);
    CHECK(kvs->count == KV_COUNT && memcmp(kvs->items[0].entry, kv_bytes, sizeof kv_bytes - 1) == 0, "metadata");
    check_texts(spk_pack_provenance(pack));
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t size_bytes = 1;
        const uint8_t *bytes = spk_pack_section(pack, place, &size_bytes);
        CHECK(size_bytes == small_model.section_bytes[place - 1], "section %u", place);
        CHECK((bytes == NULL) == (size_bytes == 0), "section %u", place);
        if (bytes == NULL) continue;
        CHECK((uintptr_t)bytes % SPK_BLOCK_ALIGN == 0, "section %u", place);
        CHECK(memcmp(bytes, expected, size_bytes) == 0, "section %u", place);
        CHECK(spk_pack_section_file_offset(pack, place) % SPK_BLOCK_ALIGN == 0, "section %u", place);
        expected += size_bytes;
    }
    CHECK(spk_pack_version(pack) == 0x10000 && strcmp(spk_pack_path(pack), pack_path) == 0, "version, path");
    CHECK_OK(spk_pack_verify(pack, 2, NULL, NULL, &error), error);
    spk_pack_close(pack);
    free(data);
}

static uint64_t u64_at(image *i, uint64_t offset) {
    uint64_t value;
    memcpy(&value, i->bytes + offset, sizeof value);
    return value;
}

static bool digest_is(image *i, uint64_t offset, uint64_t begin, uint64_t size_bytes) {
    spk_digest digest = spk_digest_of(i->bytes + begin, size_bytes);
    return memcmp(&digest, i->bytes + offset, sizeof digest) == 0;
}

/* With the page's own offsets, not the structs: header 64 bytes, table entries 64 bytes, chunks 4 MiB. */
static void digests_cover_what_the_page_says(void) {
    static const model m = { { 9 << 20, 24576, 4 << 20, 0 }, model_tensors, TENSOR_COUNT };
    free(write_model(pack_path, &m, 1 << 20));
    image i = read_image(pack_path);
    CHECK(memcmp(i.bytes, "\x8fSPK\r\n\x1a\n\x01\0\0\0", 12) == 0 && u64_at(&i, 24) == i.size_bytes, "header");
    uint32_t count = i.bytes[20];
    CHECK(count == 8, "%u sections", count);
    CHECK(digest_is(&i, 32, 64, 64 * count), "root");
    uint64_t chunks = 0, chunk = 0;
    for (uint32_t s = 0; s < count; s++)
        if (i.bytes[64 + 64 * s] == 20) chunks = u64_at(&i, 64 + 64 * s + 8);
    for (uint32_t s = 0; s < count; s++) {
        uint64_t entry = 64 + 64 * s, offset = u64_at(&i, entry + 8), size = u64_at(&i, entry + 16);
        if (i.bytes[entry] > 4) {
            CHECK(digest_is(&i, entry + 32, offset, size), "section id %u", i.bytes[entry]);
            continue;
        }
        uint64_t first = chunk;
        for (uint64_t at = 0; at < size; at += 4 << 20, chunk++) {
            uint64_t left = size - at;
            CHECK(digest_is(&i, chunks + 16 * chunk, offset + at, left < 4 << 20 ? left : 4 << 20), "chunk %u",
                  (unsigned)chunk);
        }
        CHECK(digest_is(&i, entry + 32, chunks + 16 * first, 16 * (chunk - first)), "data section %u", i.bytes[entry]);
    }
    CHECK(chunk == 5, "%u chunks", (unsigned)chunk);
    uint8_t stored[16];
    memcpy(stored, i.bytes + 48, 16);
    memset(i.bytes + 48, 0, 16);
    spk_digest checksum = spk_digest_of(i.bytes, 4096);
    CHECK(memcmp(&checksum, stored, 16) == 0, "checksum");
    free(i.bytes);
}

/* The page's example: 32 bytes of header and the entry of tensor 1. */
static void the_page_shows_this_pack(void) {
    image i = model_image();
    FILE *page = fopen("formats/spk-format.md", "r");
    CHECK(page != NULL, "run from the root of the repository");
    char line[256] = "";
    while (page != NULL && strcmp(line, "```hex\n") != 0 && fgets(line, sizeof line, page) != NULL) {}
    uint64_t count = 0;
    for (unsigned byte; page != NULL && fscanf(page, " %2x", &byte) == 1; count++) {
        const uint8_t *at = count < 32 ? i.bytes + count : (const uint8_t *)tensor_of(&i, 1) + (count - 32);
        CHECK(count < 32 + sizeof(spk_disk_tensor) && byte == *at, "byte %u of the example", (unsigned)count);
    }
    CHECK(count == 32 + sizeof(spk_disk_tensor), "%u bytes", (unsigned)count);
    if (page != NULL) (void)fclose(page);
    free(i.bytes);
}

static void digest_is_canonical_xxh3(void) {
    spk_digest digest = spk_digest_of("", 0);            /* published value of XXH3-128 of nothing, seed 0 */
    char text[33];
    spk_digest_text(&digest, text);
    CHECK(strcmp(text, "99aa06d3014798d86001c324468d497f") == 0, "%s", text);
}

static void a_digest_may_come_in_pieces(void) {
    enum { SIZE = 5000 };
    uint8_t *bytes = random_bytes(SIZE, 3);
    spk_digest whole = spk_digest_of(bytes, SIZE);
    for (uint64_t piece = 1; piece <= SIZE; piece = piece * 3 + 1) {
        spk_digester *digester = NULL;
        spk_error error = { 0 };
        CHECK_OK(spk_digester_create(&digester, &error), error);
        for (uint64_t at = 0; at < SIZE; at += piece)
            spk_digester_add(digester, bytes + at, SIZE - at < piece ? SIZE - at : piece);
        spk_digest digest = spk_digester_result(digester);
        CHECK(memcmp(&digest, &whole, sizeof digest) == 0, "pieces of %u", (unsigned)piece);
        spk_digester_destroy(digester);
    }
    free(bytes);
}

/* Sound by the rules of the format, but no model that the runtime would take: spk-info must not pass it either. */
static void spk_info_refuses_what_the_runtime_refuses(void) {
    const char *bin = getenv("SPK_BIN");
    char command[300], text[600] = "";
    spk_error error;
    if (bin == NULL) {
        SKIP("SPK_BIN is not set");
        return;
    }
    free(write_model(pack_path, &small_model, 1000));
    CHECK(check_status(pack_path, &error) == SPK_OK, "%s", error.text);
    (void)snprintf(command, sizeof command, "'%.200s/spk-info' --verify %s 2>&1", bin, pack_path);
    FILE *info = popen(command, "r");
    CHECK(info != NULL && fread(text, 1, sizeof text - 1, info) > 0, "%s", command);
    int status = info == NULL ? -1 : pclose(info);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1, "exit status %d: %s", status, text);
    CHECK(strstr(text, "block_count") != NULL && strstr(text, "verified") == NULL, "%s", text);
}

static void pieces_do_not_matter(void) {
    static const model m = { { 9 << 20, 24576, 5 << 20, 4096 }, model_tensors, TENSOR_COUNT };
    static const uint64_t pieces[] = { UINT64_C(1) << 40, 4 << 20, (4 << 20) - 1, 100001, 11 << 20 };
    free(write_model(pack_path, &m, 4096));
    image a = read_image(pack_path);
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) {
        free(write_model(other_path, &m, pieces[p]));
        image b = read_image(other_path);
        CHECK(a.size_bytes == b.size_bytes && memcmp(a.bytes, b.bytes, a.size_bytes) == 0, "case %zu", p);
        free(b.bytes);
    }
    free(a.bytes);
}

/* Sections in random turns, pieces of random sizes, some at addresses from which they are written without being gathered. */
static void sections_take_turns(void) {
    static const model m = { { 9 << 20, 24576, 14 << 20, 4096 }, model_tensors, TENSOR_COUNT };
    enum { PIECE_BYTES_MAX = 5 << 20 };
    uint8_t *data = write_model(pack_path, &m, 4096), *piece = aligned_alloc(SPK_BLOCK_ALIGN, PIECE_BYTES_MAX + 2 * SPK_BLOCK_ALIGN);
    image a = read_image(pack_path);
    uint64_t seed = 4711;
    for (int round = 0; round < 24; round++) {
        spk_error error = { 0 };
        spk_pack_writer *writer = NULL;
        spk_pack_writer_options options = options_of(other_path, &m);
        uint64_t done[SPK_PLACE_COUNT] = { 0 };
        CHECK_OK(spk_pack_writer_begin(&options, &writer, &error), error);
        CHECK(spk_pack_writer_takes_turns(writer), "a file system without holes");
        for (uint64_t left = a.size_bytes; left > 0;) {
            uint64_t p = below(&seed, SPK_PLACE_COUNT), begin = 0, size = below(&seed, below(&seed, 2) ? PIECE_BYTES_MAX : 9000);
            for (uint64_t q = 0; q < p; q++) begin += m.section_bytes[q];
            if (below(&seed, 3) == 0) size = size / SPK_BLOCK_ALIGN * SPK_BLOCK_ALIGN;
            if (size > m.section_bytes[p] - done[p]) size = m.section_bytes[p] - done[p];
            uint8_t *at = piece + (done[p] + (below(&seed, 4) == 0 ? 16 : 0)) % SPK_BLOCK_ALIGN;
            memcpy(at, data + begin + done[p], size);
            CHECK_OK(spk_pack_writer_append_to(writer, (uint32_t)p + 1, at, size, &error), error);
            memset(at, 0xee, size);              /* what was gathered is a copy */
            done[p] += size;
            left = 0;
            for (uint64_t q = 0; q < SPK_PLACE_COUNT; q++) left += m.section_bytes[q] - done[q];
        }
        CHECK(spk_pack_writer_append_to(writer, SPK_PLACE_STATIC, piece, 1, &error) == SPK_E_MISMATCH, "a byte too many");
        CHECK_OK(spk_pack_writer_commit(writer, m.tensors, &model_provenance, &error), error);
        image b = read_image(other_path);
        CHECK(a.size_bytes == b.size_bytes && memcmp(a.bytes, b.bytes, a.size_bytes) == 0, "round %d", round);
        free(b.bytes);
    }
    free(piece);
    free(data);
    free(a.bytes);
}

static bool exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

/* Begin, give `data_bytes` of data, commit with these tensors. */
static spk_status try_write(uint64_t data_bytes, const spk_tensor *tensors, spk_error *error) {
    spk_pack_writer *writer = NULL;
    spk_pack_writer_options options = options_of(other_path, &small_model);
    SPK_TRY(spk_pack_writer_begin(&options, &writer, error));
    uint8_t *data = random_bytes(data_bytes, 1);
    spk_status status = spk_pack_writer_append(writer, data, data_bytes, error);
    free(data);
    if (status != SPK_OK) {
        spk_pack_writer_abort(writer);
        return status;
    }
    return spk_pack_writer_commit(writer, tensors, &model_provenance, error);
}

/* Where the file system has no room for a journal, or none is wanted: what another job left behind is longer than this pack. */
static void a_resumed_pack_without_a_journal_has_no_tail(void) {
    pid_t child = fork();
    if (child == 0) {
        spk_outfile *left = NULL;
        _exit(spk_outfile_create(pack_path, true, 0, &left, NULL) == SPK_OK && spk_outfile_write(left, 8 << 20, "left", 4, NULL) == SPK_OK ? 0 : 1);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0, "nothing was left: %d", status);
    spk_error error = { 0 };
    spk_pack_writer *writer = NULL;
    spk_pack_writer_options options = options_of(pack_path, &small_model);
    options.resume = options.replace = true;
    uint64_t total = 0;
    for (int p = 0; p < SPK_PLACE_COUNT; p++) total += small_model.section_bytes[p];
    uint8_t *data = random_bytes(total, 7);
    CHECK_OK(spk_pack_writer_begin(&options, &writer, &error), error);
    CHECK_OK(spk_pack_writer_append(writer, data, total, &error), error);
    CHECK_OK(spk_pack_writer_commit(writer, small_model.tensors, &model_provenance, &error), error);
    spk_pack *pack = NULL;
    CHECK_OK(spk_pack_open(pack_path, &pack, &error), error);
    spk_pack_close(pack);
    free(data);
}

static void writer_publishes_only_what_the_reader_takes(void) {
    spk_error error = { 0 };
    spk_tensor tensors[TENSOR_COUNT];
    (void)unlink(other_path);
    CHECK(try_write(32768 - 1, model_tensors, &error) == SPK_E_MISMATCH && strstr(error.text, "EMBEDDING"), "%s",
          error.text);
    CHECK(try_write(32768 + 1, model_tensors, &error) == SPK_E_MISMATCH, "%s", error.text);
    memcpy(tensors, model_tensors, sizeof tensors);
    tensors[4].offset_bytes = 512;
    CHECK(try_write(32768, tensors, &error) == SPK_E_CORRUPT && strstr(error.text, "R21"), "%s", error.text);
    memcpy(tensors, model_tensors, sizeof tensors);
    tensors[1].relative_rmse = NAN;
    CHECK(try_write(32768, tensors, &error) == SPK_E_CORRUPT && strstr(error.text, "R20"), "%s", error.text);
    spk_pack_writer_options options = options_of(other_path, &small_model);
    spk_pack_writer *writer = NULL;
    options.kv_bytes_size = SPK_META_BYTES_MAX + 1;      /* refused before a byte is read */
    CHECK(spk_pack_writer_begin(&options, &writer, &error) == SPK_E_LIMIT, "%s", error.text);
    options.kv_bytes_size = sizeof kv_bytes - 1;
    options.kv_count = KV_COUNT + 1;
    CHECK(spk_pack_writer_begin(&options, &writer, &error) == SPK_E_CORRUPT, "%s", error.text);
    options.kv_count = KV_COUNT - 1;
    CHECK(spk_pack_writer_begin(&options, &writer, &error) == SPK_E_CORRUPT && strstr(error.text, "R14"), "%s",
          error.text);
    CHECK(!exists(other_path), "nothing is left");
    CHECK_OK(try_write(32768, model_tensors, &error), error);
    options.kv_count = KV_COUNT;
    spk_model_config dense = model_config;
    dense.expert_count = 0;
    options.config = &dense;
    CHECK(spk_pack_writer_begin(&options, &writer, &error) == SPK_E_CORRUPT && strstr(error.text, "R13"), "%s",
          error.text);
    options.config = &model_config;
    options.replace = false;
    CHECK(spk_pack_writer_begin(&options, &writer, &error) == SPK_E_EXISTS, "%s", error.text);
    CHECK(open_status(other_path, &error) == SPK_OK, "%s", error.text);
}

/* ---- Verify ---- */

typedef struct { uint64_t last_bytes, total_bytes, call_count; } progress_seen;

static void on_progress(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    progress_seen *seen = context;
    CHECK(done_bytes > seen->last_bytes && done_bytes <= total_bytes, "progress goes forward");
    *seen = (progress_seen){ done_bytes, total_bytes, seen->call_count + 1 };
}

/* Experts of 16 MiB: rows of gate and up alternate from byte 4096 to 8 MiB + 4096, then come 6 MiB of down. */
static const spk_tensor big_tensors[] = {
    { .name = "norm", .type = SPK_TYPE_F32, .dim_count = 1, .dims = { 256, 1, 1, 1 }, .layout = SPK_LAYOUT_ROWS,
      .section = SPK_PLACE_STATIC, .unit_stride_bytes = 1024 },
    { .name = "down", .type = SPK_TYPE_F32, .dim_count = 3, .dims = { 1024, 1536, 2, 1 }, .layout = SPK_LAYOUT_ROWS,
      .section = SPK_PLACE_EXPERTS, .offset_bytes = (8 << 20) + 4096, .unit_stride_bytes = 4096,
      .matrix_stride_bytes = 16 << 20 },
    { .name = "up", .type = SPK_TYPE_F32, .dim_count = 3, .dims = { 1024, 1024, 2, 1 }, .layout = SPK_LAYOUT_ROWS,
      .section = SPK_PLACE_EXPERTS, .offset_bytes = 8192, .unit_stride_bytes = 8192, .matrix_stride_bytes = 16 << 20 },
    { .name = "gate", .type = SPK_TYPE_F32, .dim_count = 3, .dims = { 1024, 1024, 2, 1 }, .layout = SPK_LAYOUT_ROWS,
      .section = SPK_PLACE_EXPERTS, .offset_bytes = 4096, .unit_stride_bytes = 8192, .matrix_stride_bytes = 16 << 20 },
};
static const model big_model = { { 4096, 36 << 20, 0, 8192 }, big_tensors, 4 };

static const struct { uint32_t place; uint64_t byte; const char *chunk, *tensor; } damages[] = {
    { SPK_PLACE_STATIC, 4095, "chunk 0 of section STATIC (4096 bytes", "it: norm" },
    { SPK_PLACE_EXPERTS, 0, "chunk 0 of section EXPERTS (4194304 bytes", "it: gate" },
    { SPK_PLACE_EXPERTS, (8 << 20) - 1, "chunk 1 of section EXPERTS", "it: up" },
    { SPK_PLACE_EXPERTS, 12 << 20, "chunk 3 of section EXPERTS", "it: down" },
    { SPK_PLACE_EXPERTS, 17 << 20, "chunk 4 of section EXPERTS", "it: gate" },
    { SPK_PLACE_EXPERTS, (32 << 20) - 1, "chunk 7 of section EXPERTS", "it: down" },
    { SPK_PLACE_EXPERTS, (36 << 20) - 1, "chunk 8 of section EXPERTS", "it: none" },
    { SPK_PLACE_EXTRA, 8191, "chunk 0 of section EXTRA", "it: none" },
};

static void verify_names_chunk_and_tensor(void) {
    free(write_model(pack_path, &big_model, 1 << 20));
    spk_error error = { 0 };
    spk_pack *pack = NULL;
    CHECK_OK(spk_pack_open(pack_path, &pack, &error), error);
    if (pack == NULL) return;
    progress_seen seen = { 0 };
    CHECK_OK(spk_pack_verify(pack, 2, on_progress, &seen, &error), error);
    CHECK(seen.last_bytes == (36 << 20) + 4096 + 8192 && seen.total_bytes == seen.last_bytes, "reaches the end");
    FILE *file = fopen(pack_path, "r+b");
    uint8_t *map = mmap(NULL, spk_pack_file_bytes(pack), PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    /* From the last to the first, each left in place: the first damage of the file is the one that is named. */
    for (size_t d = sizeof damages / sizeof *damages; d-- > 0;) {
        uint64_t at = spk_pack_section_file_offset(pack, damages[d].place) + damages[d].byte;
        map[at] ^= 0x10;
        for (uint32_t threads = 1; threads <= 3; threads++) {
            spk_status status = spk_pack_verify(pack, threads, NULL, NULL, &error);
            CHECK(status == SPK_E_CHECKSUM && strstr(error.text, damages[d].chunk) &&
                  strstr(error.text, damages[d].tensor), "case %zu, %u threads: %s", d, threads, error.text);
        }
    }
    (void)munmap(map, spk_pack_file_bytes(pack));
    (void)fclose(file);
    spk_pack_close(pack);
}

int main(void) {
    if (!open_folder()) return 1;
    RUN(digest_is_canonical_xxh3);
    RUN(reads_back_what_was_written);
    RUN(digests_cover_what_the_page_says);
    RUN(the_page_shows_this_pack);
    RUN(a_digest_may_come_in_pieces);
    RUN(spk_info_refuses_what_the_runtime_refuses);
    RUN(pieces_do_not_matter);
    RUN(sections_take_turns);
    RUN(a_resumed_pack_without_a_journal_has_no_tail);
    RUN(writer_publishes_only_what_the_reader_takes);
    RUN(verify_names_chunk_and_tensor);
    close_folder();
    return CHECK_EXIT();
}
