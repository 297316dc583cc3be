/* tests/checkkern_bench.h - times kernels that have just passed, cold, against a plain read in the same process.
 *
 * bytes_model counts what a kernel must move: weights, cache or state, once; activations are left out (they stay near).
 * "cold": the data of one run is BENCH_BYTES or more, so that no run finds what the one before left in a cache of half
 * that size.  "l1": the same small operands again and again, for the cost of the instructions.
 * read_gbps is a loop that only loads, over as many bytes, with as many threads, moments before.
 */
#ifndef SPK_CHECKKERN_BENCH_H
#define SPK_CHECKKERN_BENCH_H

#include <time.h>
#include "formats/pool.h"
#include "tests/checkkern_matmul.h"

#define BENCH_BYTES UINT64_C(640000000)
enum { BENCH_RUNS = 7, BENCH_TOKENS = 64 };

typedef struct {
    bool matmul[SPK_TYPE_LIMIT][3];
    bool quantize, norms, gates, rope, top_k, attend, conv, gdn;
} passed_ops;

static double now_s(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One measurement: fn over item_count items. */
typedef struct {
    const char  *op, *shape, *cache;
    uint64_t     bytes, multiply_adds, item_count, grain;
    spk_pool_fn *fn;
    void        *context;
} bench_item;

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double bench_median(const bench_item *item, spk_pool *pool, double *least) {
    double seconds[BENCH_RUNS];
    for (int run = -1; run < BENCH_RUNS; run++) {     /* the first touches everything, untimed */
        double start = now_s();
        spk_pool_run(pool, item->item_count, item->grain, item->fn, item->context);
        if (run >= 0) seconds[run] = now_s() - start;
    }
    qsort(seconds, BENCH_RUNS, sizeof *seconds, by_value);
    *least = seconds[0];
    return seconds[BENCH_RUNS / 2];
}

static void bench_print(const bench_item *item, const char *variant, spk_pool *pool, double read_gbps) {
    double least, median = bench_median(item, pool, &least), gbps = 1e-9 * (double)item->bytes / median;
    printf("%s,%s,%s,%u,checked,%llu,%s,%d,%.4f,%.4f,%.2f,%.2f,%.2f,%.2f\n", item->op, item->shape, variant,
           spk_pool_thread_count(pool), (unsigned long long)item->bytes, item->cache, BENCH_RUNS, 1e3 * least,
           1e3 * median, gbps, 1e-9 * (double)item->multiply_adds / median, read_gbps,
           read_gbps > 0 ? gbps / read_gbps : 0);
    fflush(stdout);
}

/* ---- A plain read ---- */

enum { READ_PIECE = 1 << 20 };
typedef uint64_t read_vector __attribute__((vector_size(16)));
static volatile uint64_t read_sink;

static void read_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const uint8_t *bytes = context;
    read_vector x = { 0 }, y = { 0 };
    (void)thread_index;
    for (const uint8_t *p = bytes + begin * READ_PIECE; p < bytes + end * READ_PIECE; p += 64) {
        const read_vector *line = (const void *)p;
        __builtin_prefetch(p + 8192, 0, 2);
        x ^= line[0] ^ line[1];
        y ^= line[2] ^ line[3];
    }
    x ^= y;
    read_sink = x[0] ^ x[1];
}

static double bench_read(const uint8_t *bytes, uint64_t size_bytes, spk_pool *pool) {
    double least;
    bench_item item = { "read", "", "cold", size_bytes / READ_PIECE * READ_PIECE, 0, size_bytes / READ_PIECE, 4,
                        read_pieces, (void *)(uintptr_t)bytes };
    double median = bench_median(&item, pool, &least);
    return 1e-9 * (double)item.bytes / median;
}

/* ---- Products ---- */

typedef struct {
    spk_matmul_fn  *fn;
    spk_matrix      matrix;
    spk_activation *x;
    float         **y;
    uint32_t        token_count;
} bench_matmul;

static void matmul_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const bench_matmul *b = context;
    (void)thread_index;
    b->fn(&b->matrix, b->x, b->y, b->token_count, begin, end);
}

static void bench_one_matmul(const spk_kernels *table, const spk_type_info *info, uint32_t layout, uint64_t cols,
                             uint32_t token_count, spk_pool **pools, int pool_count) {
    const uint32_t type = info->type;
    uint64_t row_bytes = cols / info->block_weights * info->block_bytes;
    uint64_t rows = (token_count == 1 ? BENCH_BYTES : BENCH_BYTES / 32) / row_bytes / 32 * 32;
    uint64_t unit_bytes = spk_layout_unit_bytes(layout, type, cols);
    uint64_t size_bytes = unit_bytes * spk_layout_unit_count(layout, type, rows, cols);
    uint8_t *data = must(aligned_alloc(4096, (size_bytes + 4095) / 4096 * 4096));
    if (!info->is_quantized) fill_float_weights(type, W_RANDOM, data, rows * cols, &random_state);
    for (uint64_t i = 0; info->is_quantized && i + 8 <= size_bytes; i += 8) {
        /* Bytes below 0x40 keep every factor finite, whatever they are part of. */
        uint64_t r = check_random(&random_state) & UINT64_C(0x3f3f3f3f3f3f3f3f);
        memcpy(data + i, &r, 8);
    }
    spk_activation x[BENCH_TOKENS];
    float *y[BENCH_TOKENS];
    for (uint32_t t = 0; t < token_count; t++) {
        x[t] = spk_activation_carve(must(aligned_alloc(64, spk_activation_bytes(cols))), cols);
        y[t] = new_floats(rows);
        fill(X_RANDOM, x[t].f32, cols);
        table->quantize(&x[t]);
    }
    bench_matmul b = { table->matmul[type][layout], { data, unit_bytes, type, layout, rows, cols }, x, y, token_count };
    char shape[64], op[32];
    (void)snprintf(shape, sizeof shape, "%llux%llu tokens=%u", (unsigned long long)rows, (unsigned long long)cols,
                   token_count);
    (void)snprintf(op, sizeof op, "matmul %s %s", info->name, spk_layout_name(layout));
    for (int p = 0; p < pool_count; p++) {
        uint64_t units = layout == SPK_LAYOUT_T32 ? spk_t32_geometry_of(type, rows, cols).group_count : rows;
        bench_item item = { op, shape, token_count == 1 ? "cold" : "near", size_bytes, rows * cols * token_count, units,
                            1 + (uint64_t)200000 / (size_bytes / units), matmul_pieces, &b };
        bench_print(&item, table->name, pools[p], token_count == 1 ? bench_read(data, size_bytes, pools[p]) : 0);
    }
    for (uint32_t t = 0; t < token_count; t++) free(x[t].f32), free(y[t]);
    free(data);
}

static void bench_matmuls(const spk_kernels *table, const passed_ops *passed, spk_pool **pools, int pool_count) {
    static const uint32_t types[] = { SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K, SPK_TYPE_Q8_0 };
    static const uint32_t float_types[] = { SPK_TYPE_F32, SPK_TYPE_F16, SPK_TYPE_BF16 };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (!passed->matmul[types[i]][SPK_LAYOUT_T32]) continue;
        bench_one_matmul(table, spk_type_find(types[i]), SPK_LAYOUT_T32, 2048, 1, pools, pool_count);
        bench_one_matmul(table, spk_type_find(types[i]), SPK_LAYOUT_T32, 512, 1, pools, pool_count);
        bench_one_matmul(table, spk_type_find(types[i]), SPK_LAYOUT_T32, 2048, BENCH_TOKENS, pools, pool_count);
    }
    for (size_t i = 0; i < sizeof float_types / sizeof *float_types; i++)
        if (passed->matmul[float_types[i]][SPK_LAYOUT_ROWS])
            bench_one_matmul(table, spk_type_find(float_types[i]), SPK_LAYOUT_ROWS, 2048, 1, pools, pool_count);
}

/* ---- Attention and delta rule: items are heads, each with memory of its own ---- */

enum { BENCH_LAYERS = 10, KV_HEADS = 2, POSITIONS = 32768, HEAD_DIM = 256, GDN_HEADS = 9600, GDN_DIM = 128 };

typedef struct {
    const spk_kernels *table;
    uint8_t           *memory;                        /* caches of all layers, or states of all heads */
    spk_gdn_shape      shape;
    float             *vectors, *scores, *out;        /* scores and out: for each item */
} bench_heads;

static void attend_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const bench_heads *b = context;
    const uint64_t half_bytes = (uint64_t)KV_HEADS * POSITIONS * HEAD_DIM * 2;
    (void)thread_index;
    for (uint64_t h = begin; h < end; h++) {
        uint8_t *layer = b->memory + h / KV_HEADS * 2 * half_bytes;
        spk_attention_cache cache = { layer, layer + half_bytes, KV_HEADS, KV_HEADS, HEAD_DIM };
        b->table->attend(&cache, (uint32_t)h % KV_HEADS, POSITIONS - 1, b->vectors, b->scores + h * POSITIONS,
                         b->out + h * HEAD_DIM);
    }
}

static void gdn_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const bench_heads *b = context;
    const float *v = b->vectors;
    (void)thread_index;
    for (uint64_t h = begin; h < end; h++) {
        float *state = (float *)(void *)b->memory + h * GDN_DIM * GDN_DIM;
        b->table->gdn_head(&b->shape, state, v, v + 128, v + 256, 0.9f, 0.5f, v, v, b->out + h * GDN_DIM);
    }
}

static void bench_sequence(const spk_kernels *table, const passed_ops *passed, spk_pool **pools, int pool_count) {
    const uint64_t items = BENCH_LAYERS * KV_HEADS, cache_bytes = items * POSITIONS * HEAD_DIM * 2 * 2;
    const uint64_t state_count = (uint64_t)GDN_HEADS * GDN_DIM * GDN_DIM;
    bench_heads b = { table, must(aligned_alloc(4096, cache_bytes)), { 1, 1, GDN_DIM, GDN_DIM, 4, 1e-6f },
                      new_floats(512), new_floats(items * POSITIONS), new_floats(GDN_HEADS * GDN_DIM) };
    const bench_item attend = { "attend", "head_dim=256 kv_heads=2 positions=32768", "cold", cache_bytes,
                                2 * items * POSITIONS * HEAD_DIM, items, 1, attend_pieces, &b };
    const bench_item gdn = { "gdn_head", "128x128 read and written", "cold", 2 * state_count * 4, 3 * state_count,
                             GDN_HEADS, 8, gdn_pieces, &b };
    fill(X_RANDOM, b.vectors, 512);
    for (int p = 0; p < pool_count; p++) {
        fill_float_weights(SPK_TYPE_F16, W_RANDOM, b.memory, cache_bytes / 2, &random_state);
        double read = bench_read(b.memory, cache_bytes, pools[p]);
        if (passed->attend) bench_print(&attend, table->name, pools[p], read);
        memset(b.memory, 0, state_count * 4);         /* halves are not states */
        if (passed->gdn) bench_print(&gdn, table->name, pools[p], read);
    }
    free(b.memory), free(b.vectors), free(b.scores), free(b.out);
}

/* ---- Small operations: instructions only ---- */

enum { SMALL_REPEATS = 1000 };

typedef struct { const spk_kernels *table; float *x, *y, *w; spk_activation activation; } bench_small;

#define SMALL_OP(name, call)                                                                          \
    static void name##_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {   \
        bench_small *s = context;                                                                     \
        (void)thread_index;                                                                           \
        for (uint64_t i = begin; i < end; i++) { call; }                                              \
    }
SMALL_OP(quantize, s->table->quantize(&s->activation))
SMALL_OP(rms_norm, s->table->rms_norm(s->x, s->w, 2048, 1e-6f, s->y))
SMALL_OP(swiglu, s->table->swiglu(s->x, s->w, 2048, s->y))
SMALL_OP(top_k, uint32_t index[8]; s->table->top_k(s->x, 256, 8, index, s->y))
SMALL_OP(rope, memcpy(s->y, s->x, 1024); s->table->qk_norm_rope(s->y, s->w, 256, 64, s->w, 1e-6f))
SMALL_OP(conv, s->table->gdn_conv(s->x, s->w, s->y, 2048, 4, 0, 2048, s->x + 2048))

static void bench_smalls(const spk_kernels *table, const passed_ops *passed, spk_pool *pool) {
    bench_small s = { table, new_floats(4096), new_floats(3 * 2048), new_floats(4 * 2048), { 0 } };
    void *block = must(aligned_alloc(64, spk_activation_bytes(2048)));
    s.activation = spk_activation_carve(block, 2048);
    fill(X_RANDOM, s.activation.f32, 2048);
    fill(X_RANDOM, s.x, 4096);
    fill(X_RANDOM, s.y, 3 * 2048);
    fill(X_RANDOM, s.w, 4 * 2048);
    const struct { bool passed; const char *op, *shape; spk_pool_fn *fn; } ops[] = {
        { passed->quantize, "quantize x1000", "2048", quantize_pieces },
        { passed->norms, "rms_norm x1000", "2048", rms_norm_pieces },
        { passed->gates, "swiglu x1000", "2048", swiglu_pieces },
        { passed->top_k, "top_k x1000", "256 k=8", top_k_pieces },
        { passed->rope, "qk_norm_rope x1000", "256 rope=64", rope_pieces },
        { passed->conv, "gdn_conv x1000", "2048 channels", conv_pieces },
    };
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        bench_item item = { ops[i].op, ops[i].shape, "l1", 0, 0, SMALL_REPEATS, SMALL_REPEATS, ops[i].fn, &s };
        if (ops[i].passed) bench_print(&item, table->name, pool, 0);
    }
    free(block), free(s.x), free(s.y), free(s.w);
}

static int bench(const spk_kernels *table, const passed_ops *passed) {
    spk_pool *pools[2] = { NULL, NULL };
    spk_error err = { 0 };
    if (spk_pool_create(1, &pools[0], &err) != SPK_OK || spk_pool_create(0, &pools[1], &err) != SPK_OK) {
        fprintf(stderr, "checkkern: %s\n", err.text);
        spk_pool_destroy(pools[0]);
        return 1;
    }
    int pool_count = spk_pool_thread_count(pools[1]) > 1 ? 2 : 1;
    printf("op,shape,variant,threads,status,bytes_model,cache,runs,ms_min,ms_median,gbps_median,gmac_per_s,read_gbps,"
           "fraction\n");
    bench_matmuls(table, passed, pools, pool_count);
    bench_sequence(table, passed, pools, pool_count);
    bench_smalls(table, passed, pools[0]);
    spk_pool_destroy(pools[0]);
    spk_pool_destroy(pools[1]);
    return 0;
}

#endif
