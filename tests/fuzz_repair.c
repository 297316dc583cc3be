/* tests/fuzz_repair.c - packs whose directory is changed in any legal way, checksums right, and whose weights are damaged, repaired
 * from their true source: the pack comes out whole, or the repair is refused in one line; what was written has its digest.
 *
 * An input chooses a pack by its first byte; the rest are changes of eight bytes each (struct change). */
#include <stddef.h>
#include <stdint.h>
#define FUZZ_TEST_SECONDS 3

#include "formats/dequant.h"
#include "formats/spk.h"
#include "requant/repair.h"
#include "tests/fuzz.h"
#include "tests/model_build.h"

#define SECTION_BYTES_MAX (UINT64_C(6) << 20)    /* as far as an input may grow one */

/* ---- Packs of small models ---- */

typedef struct {
    char      source_path[GB_PATH_MAX];
    spk_gguf *source;
    spk_pack *pack;
} base;
enum { BASE_COUNT = 4 };
static base bases[BASE_COUNT];

static void write_source(const char *path, model_parts *m) {
    spk_error err = { 0 };
    spk_gguf_writer *writer = NULL;
    spk_gguf_writer_options options = { .path = path, .replace = true, .version = 3, .alignment_bytes = 32, .kv_bytes = m->kvs,
                                        .kv_bytes_size = m->kv_bytes, .kv_count = m->kv_count, .tensors = m->tensors,
                                        .tensor_count = m->tensor_count };
    FUZZ_ASSERT(spk_gguf_writer_begin(&options, &writer, &err) == SPK_OK, "%s", err.text);
    for (uint64_t i = 0, seed = 3; i < m->tensor_count; i++) {
        spk_gguf_tensor_spec flat = m->tensors[i];
        uint64_t bytes;
        flat.dims[1] *= flat.dims[2];
        FUZZ_ASSERT(spk_type_bytes(flat.type, flat.dims[0] * flat.dims[1], &bytes, &err) == SPK_OK, "%s", err.text);
        uint8_t *data = calloc(1, bytes);
        if (data == NULL) abort();
        model_fill(&flat, data, &seed);
        FUZZ_ASSERT(spk_gguf_writer_append(writer, data, bytes, &err) == SPK_OK, "%s", err.text);
        free(data);
    }
    FUZZ_ASSERT(spk_gguf_writer_commit(writer, &err) == SPK_OK, "%s", err.text);
}

static void expert_tensor(model_parts *m, const char *name, uint32_t type, uint64_t d0, uint64_t d1, uint64_t count) {
    model_tensor(m, 0, name, type, d0, d1);
    m->tensors[m->tensor_count - 1].dim_count = 3;
    m->tensors[m->tensor_count - 1].dims[2] = count;
}

/* A layer of experts, and two tensors that decode does not read. */
static void build_experts(const char *path) {
    enum { HIDDEN = 256, EXPERTS = 3, FF = 256, HEADS = 2, HEAD = 64 };
    model_parts *m = calloc(1, sizeof *m);
    if (m == NULL || (m->kvs = calloc(1, 1 << 16)) == NULL) abort();
    static const uint8_t arch[] = "\x08\0\0\0\0\0\0\0qwen3moe";
    model_key(m, "general.architecture", SPK_KV_STRING, arch, sizeof arch - 1);
    static const struct { const char *key; uint32_t value; } keys[] = {
        { "qwen3moe.block_count", 1 }, { "qwen3moe.context_length", 64 }, { "qwen3moe.embedding_length", HIDDEN },
        { "qwen3moe.attention.head_count", HEADS }, { "qwen3moe.attention.head_count_kv", 1 },
        { "qwen3moe.attention.key_length", HEAD }, { "qwen3moe.expert_count", EXPERTS }, { "qwen3moe.expert_used_count", 2 },
        { "qwen3moe.expert_feed_forward_length", FF } };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) model_u32(m, keys[i].key, keys[i].value);
    float eps = 1e-6f;
    model_key(m, "qwen3moe.attention.layer_norm_rms_epsilon", SPK_KV_F32, &eps, 4);
    model_tensor(m, -1, "token_embd.weight", SPK_TYPE_Q8_0, HIDDEN, 40);
    model_tensor(m, -1, "output.weight", SPK_TYPE_Q8_0, HIDDEN, 40);
    model_tensor(m, -1, "output_norm.weight", SPK_TYPE_F32, HIDDEN, 0);
    model_tensor(m, 0, "attn_norm.weight", SPK_TYPE_F32, HIDDEN, 0);
    model_tensor(m, 0, "attn_q.weight", SPK_TYPE_Q8_0, HIDDEN, HEADS * HEAD);
    model_tensor(m, 0, "attn_k.weight", SPK_TYPE_Q8_0, HIDDEN, HEAD);
    model_tensor(m, 0, "attn_v.weight", SPK_TYPE_Q8_0, HIDDEN, HEAD);
    model_tensor(m, 0, "attn_output.weight", SPK_TYPE_Q8_0, HEADS * HEAD, HIDDEN);
    model_tensor(m, 0, "attn_q_norm.weight", SPK_TYPE_F32, HEAD, 0);
    model_tensor(m, 0, "attn_k_norm.weight", SPK_TYPE_F32, HEAD, 0);
    model_tensor(m, 0, "ffn_norm.weight", SPK_TYPE_F32, HIDDEN, 0);
    model_tensor(m, 0, "ffn_gate_inp.weight", SPK_TYPE_F32, HIDDEN, EXPERTS);
    expert_tensor(m, "ffn_gate_exps.weight", SPK_TYPE_Q8_0, HIDDEN, FF, EXPERTS);
    expert_tensor(m, "ffn_up_exps.weight", SPK_TYPE_Q8_0, HIDDEN, FF, EXPERTS);
    expert_tensor(m, "ffn_down_exps.weight", SPK_TYPE_Q8_0, FF, HIDDEN, EXPERTS);
    model_tensor(m, -1, "extra.vector", SPK_TYPE_F32, 100, 3);
    model_tensor(m, -1, "extra.weight", SPK_TYPE_Q8_0, HIDDEN, 40);
    write_source(path, m);
    free(m->kvs);
    free(m);
}

static void open_base(base *b, const char *source_path, const char *pack_path, const char *set) {
    spk_error err = { 0 };
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    spk_status status = spk_gguf_open(source_path, &b->source, &err);
    if (status == SPK_OK) status = spk_recipe_load("native", "", &recipe, &err);
    if (status == SPK_OK && set != NULL) status = spk_recipe_set(recipe, set, &err);
    spk_convert_options options = { .source = b->source, .out_path = pack_path, .recipe = recipe, .imatrix_name = "", .thread_count = 1 };
    if (status == SPK_OK) status = spk_convert_plan_make(&options, &plan, &err);
    if (status == SPK_OK) status = spk_convert_run(&options, &plan, &err);
    if (status == SPK_OK) status = spk_pack_open(pack_path, &b->pack, &err);
    FUZZ_ASSERT(status == SPK_OK, "%s", err.text);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
}

static void make_bases(void) {
    static const model_shape dense = { 256, 2, 2, 1, 64, 1, 2, 64, 512, 40, SPK_TYPE_Q8_0 };
    if (bases[0].pack != NULL) return;
    char dense_path[GB_PATH_MAX], experts_path[GB_PATH_MAX];
    (void)snprintf(dense_path, sizeof dense_path, "%s", fuzz_path("dense.gguf"));
    (void)snprintf(experts_path, sizeof experts_path, "%s", fuzz_path("experts.gguf"));
    model_build(dense_path, &dense, 5);
    build_experts(experts_path);
    open_base(&bases[0], dense_path, fuzz_path("0.spk"), NULL);
    open_base(&bases[1], dense_path, fuzz_path("1.spk"), ".*ffn_(up|down)\\.weight=Q4_K");
    open_base(&bases[2], experts_path, fuzz_path("2.spk"), NULL);
    open_base(&bases[3], experts_path, fuzz_path("3.spk"), ".*ffn_(up|down)_exps\\.weight=Q6_K");
}

/* ---- Changes of a directory ---- */

enum { MOVE, MOVE_ROWS, MOVE_TILES, SET_FIELD, ADD_FIELD, EXCHANGE, RETYPE, GROW, CHANGE_KIND_COUNT };
typedef struct {
    uint8_t  kind, tensor;
    uint8_t  place;          /* MOVE*, GROW: the section; SET_FIELD, ADD_FIELD: the field; EXCHANGE: the other; RETYPE: the type */
    uint8_t  shift;          /* MOVE*: units; ADD_FIELD: log2 of the step */
    uint16_t stride;         /* MOVE*: of units, in 16 bytes; else a number */
    uint16_t phase;          /* MOVE*: in 16 bytes */
} change;
SPK_STATIC_ASSERT(sizeof(change) == 8, "of an input");

static const uint32_t types[] = { SPK_TYPE_F32, SPK_TYPE_Q8_0, SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K };

typedef struct {
    spk_tensor *tensors;
    uint64_t    count, section_bytes[SPK_PLACE_COUNT];
    uint64_t    begin_bytes[SPK_PLACE_COUNT];        /* of what is moved there: several tensors may share it */
} directory;

static void add_number(void *field, size_t width, uint64_t value, bool is_added) {
    uint64_t number = 0;
    memcpy(&number, field, width);
    number = is_added ? number + value : value;
    memcpy(field, &number, width);
}

/* To the end of a section, where units of several may alternate; with room for all of them. */
static void move(directory *d, spk_tensor *t, const change *c) {
    uint32_t place = c->place % SPK_PLACE_COUNT;
    if (c->kind == MOVE_ROWS) t->layout = SPK_LAYOUT_ROWS;
    if (c->kind == MOVE_TILES && spk_t32_accepts(t->type, t->dims[0])) t->layout = SPK_LAYOUT_T32;
    uint64_t unit_bytes = spk_layout_unit_bytes(t->layout, t->type, t->dims[0]), count = spk_tensor_matrix_count(t);
    uint64_t units = spk_layout_unit_count(t->layout, t->type, t->dims[1], t->dims[0]);
    uint64_t stride = UINT64_C(16) * c->stride;
    if (stride < unit_bytes) stride = (unit_bytes + 63) / 64 * 64;
    uint64_t matrix_bytes = (stride * units + unit_bytes + 63) / 64 * 64;
    uint64_t offset = d->begin_bytes[place] + c->shift * stride + UINT64_C(16) * c->phase;
    uint64_t end = (offset + matrix_bytes * count + 4095) / 4096 * 4096;
    if (end > SECTION_BYTES_MAX) return;
    t->section = place + 1;
    t->offset_bytes = offset;
    t->unit_stride_bytes = stride;
    t->matrix_stride_bytes = count > 1 ? matrix_bytes : 0;
    if (end > d->section_bytes[place]) d->section_bytes[place] = end;
}

static void set_field(spk_tensor *t, const change *c, bool is_added) {
    const struct { void *at; size_t width; } fields[] = {
        { &t->offset_bytes, 8 }, { &t->unit_stride_bytes, 8 }, { &t->matrix_stride_bytes, 8 }, { &t->section, 4 },
        { &t->layout, 4 }, { &t->source_type, 4 }, { &t->dims[1], 8 }, { &t->dims[2], 8 }, { &t->relative_rmse, 8 },
    };
    uint64_t step = UINT64_C(1) << c->shift % 16;
    size_t f = c->place % (sizeof fields / sizeof *fields);
    add_number(fields[f].at, fields[f].width, is_added ? (c->stride % 2 ? step : 0 - step) : c->stride, is_added);
}

static void apply(directory *d, const change *c) {
    spk_tensor *t = &d->tensors[c->tensor % d->count], kept = *t;
    spk_tensor *other = &d->tensors[c->place % d->count];
    uint32_t place = c->place % SPK_PLACE_COUNT;
    uint64_t grown = d->section_bytes[place] + UINT64_C(4096) * (c->stride % 256);
    const spk_type_info *type = spk_type_find(t->type);
    bool is_laid_out = t->layout == SPK_LAYOUT_ROWS ? t->dims[0] % type->block_weights == 0
                                                    : t->layout == SPK_LAYOUT_T32 && spk_t32_accepts(t->type, t->dims[0]);
    bool is_shaped = is_laid_out && t->dims[1] > 0 && t->dims[1] < 4096 && t->dims[2] > 0 && t->dims[2] < 64;
    switch (c->kind % CHANGE_KIND_COUNT) {
    case MOVE: case MOVE_ROWS: case MOVE_TILES: if (is_shaped) move(d, t, c); break;
    case SET_FIELD: set_field(t, c, false); break;
    case ADD_FIELD: set_field(t, c, true); break;
    case EXCHANGE:
        *t = *other;
        *other = kept;
        break;
    case RETYPE:
        t->type = types[c->place % (sizeof types / sizeof *types)];
        if (t->dims[0] % spk_type_find(t->type)->block_weights != 0) t->type = kept.type;
        break;
    default: if (grown <= SECTION_BYTES_MAX) d->section_bytes[place] = grown;
    }
}

/* False where a writer, and so a reader, refuses it. */
static bool write_pack(const base *b, const directory *d, const char *path) {
    spk_error err = { 0 };
    spk_pack_writer *writer = NULL;
    const spk_kv_set *kvs = spk_pack_kvs(b->pack);
    const spk_kv *last = &kvs->items[kvs->count - 1];
    spk_pack_writer_options options = { .path = path, .replace = true, .config = spk_pack_config(b->pack), .kv_count = kvs->count,
                                        .kv_bytes = kvs->items[0].entry, .tensor_count = d->count,
                                        .kv_bytes_size = (uint64_t)(last->entry + last->entry_bytes - kvs->items[0].entry) };
    memcpy(options.section_bytes, d->section_bytes, sizeof options.section_bytes);
    if (spk_pack_writer_begin(&options, &writer, &err) != SPK_OK) return false;
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t size, more;
        const uint8_t *section = spk_pack_section(b->pack, place, &size);
        more = d->section_bytes[place - 1] - size;
        uint8_t *zeros = calloc(1, more + 1);
        FUZZ_ASSERT(zeros != NULL && spk_pack_writer_append(writer, section, size, &err) == SPK_OK &&
                    spk_pack_writer_append(writer, zeros, more, &err) == SPK_OK, "%s", err.text);
        free(zeros);
    }
    return spk_pack_writer_commit(writer, d->tensors, spk_pack_provenance(b->pack), &err) == SPK_OK;
}

/* ---- The property ---- */

/* One byte of every chunk. */
static uint64_t damage(const char *path) {
    spk_pack *pack = NULL;
    spk_error err = { 0 };
    FUZZ_ASSERT(spk_pack_open(path, &pack, &err) == SPK_OK, "%s", err.text);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint64_t count = 0, size;
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        const uint8_t *section = spk_pack_section(pack, place, &size);
        for (uint64_t at = 0; at < size; at += SPK_CHUNK_BYTES, count++) {
            uint8_t byte = section[at + 100] ^ 4;
            if (pwrite(fd, &byte, 1, (off_t)(spk_pack_section_file_offset(pack, place) + at + 100)) != 1) abort();
        }
    }
    (void)close(fd);
    spk_pack_close(pack);
    return count;
}

static void check_repair(const base *b, const char *path) {
    spk_error err = { 0 };
    spk_repair_result result;
    uint64_t damaged_count = damage(path);
    spk_status status = spk_repair(path, &(spk_repair_options){ .source = b->source }, &result, &err);
    FUZZ_ASSERT(result.repaired_count <= result.damaged_count && result.damaged_count <= damaged_count, "counts");
    FUZZ_ASSERT(status == SPK_OK || (err.text[0] != '\0' && strchr(err.text, '\n') == NULL), "%s", err.text);
    if (status != SPK_OK) return;
    fuzz_accepted_count++;
    spk_pack *pack = NULL;
    FUZZ_ASSERT(result.repaired_count == damaged_count, "not all");
    FUZZ_ASSERT(spk_pack_open(path, &pack, &err) == SPK_OK && spk_pack_verify(pack, 1, NULL, NULL, &err) == SPK_OK, "%s", err.text);
    spk_pack_close(pack);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    make_bases();
    if (size < 1) return 0;
    const base *b = &bases[bytes[0] % BASE_COUNT];
    directory d = { .count = spk_pack_tensor_count(b->pack) };
    d.tensors = malloc(d.count * sizeof *d.tensors);
    if (d.tensors == NULL) abort();
    memcpy(d.tensors, spk_pack_tensors(b->pack), d.count * sizeof *d.tensors);
    for (uint32_t place = 0; place < SPK_PLACE_COUNT; place++) {
        (void)spk_pack_section(b->pack, place + 1, &d.section_bytes[place]);
        d.begin_bytes[place] = d.section_bytes[place];
    }
    for (size_t at = 1; at + sizeof(change) <= size && at < 1 + 16 * sizeof(change); at += sizeof(change)) {
        change c;
        memcpy(&c, bytes + at, sizeof c);
        apply(&d, &c);
    }
    const char *path = fuzz_path("a.spk");
    if (write_pack(b, &d, path)) check_repair(b, path);
    free(d.tensors);
    return 0;
}

/* Each pack as it is; and what a reader takes though spk-pack would not make it: tensors elsewhere, alone or with others. */
void fuzz_seeds(void) {
    static const change seeds[][3] = {
        { { .kind = ADD_FIELD, .place = 8, .stride = 1 } },
        { { MOVE_ROWS, 1, 0, 0, 1024, 0 }, { MOVE_ROWS, 2, 0, 38, 1024, 64 } },
        { { MOVE_TILES, 4, 0, 2, 600, 0 }, { MOVE_ROWS, 6, 0, 2, 600, 544 } },
        { { MOVE_TILES, 12, 0, 0, 1120, 0 }, { MOVE_TILES, 5, 0, 0, 1120, 544 } },
        { { MOVE_ROWS, 4, 0, 0, 100, 0 }, { MOVE, 3, 0, 0, 100, 20 } },
        { { MOVE, 16, 3, 0, 0, 0 } },
        { { .kind = RETYPE, .tensor = 16, .place = 2 } },
        { { .kind = GROW, .place = 0, .stride = 200 } },
    };
    for (uint8_t which = 0; which < BASE_COUNT; which++)
        for (size_t s = 0; s < sizeof seeds / sizeof *seeds; s++) {
            uint8_t input[1 + sizeof seeds[s]] = { which };
            memcpy(input + 1, seeds[s], sizeof seeds[s]);
            fuzz_seed(input, 1 + (s == 0 ? 1 : 2) * sizeof(change));
        }
}
