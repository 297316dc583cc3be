/* tests/gguf_build.h - small GGUF files made by code, right or wrong, for tests.
 *
 * Nothing is checked: a test writes exactly the bytes that it means to.  The order is that of the file: gb_header,
 * gb_kv_* , gb_tensor, gb_pad, then data.  gb_u32_at and gb_u64_at patch what is there.
 */
#ifndef SPK_TEST_GGUF_BUILD_H
#define SPK_TEST_GGUF_BUILD_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "formats/kv.h"

enum { GB_PATH_MAX = 400, GB_HEADER_BYTES = 24 };

typedef struct {
    uint8_t *bytes;
    size_t   size, capacity;
} gguf_build;

/* Dimensions, ne0 first: gb_tensor(b, "a", SPK_TYPE_F32, 0, GB_DIMS(8, 2)). */
#define GB_DIMS(...) \
    (const uint64_t[]){ __VA_ARGS__ }, (uint32_t)(sizeof((const uint64_t[]){ __VA_ARGS__ }) / sizeof(uint64_t))

static inline void gb_raw(gguf_build *b, const void *bytes, size_t size) {
    if (b->size + size > b->capacity) {
        b->capacity = 2 * (b->size + size);
        b->bytes = realloc(b->bytes, b->capacity);
        if (b->bytes == NULL) abort();
    }
    if (size > 0) memcpy(b->bytes + b->size, bytes, size);
    b->size += size;
}

static inline void gb_u8(gguf_build *b, uint8_t value) { gb_raw(b, &value, sizeof value); }
static inline void gb_u32(gguf_build *b, uint32_t value) { gb_raw(b, &value, sizeof value); }
static inline void gb_u64(gguf_build *b, uint64_t value) { gb_raw(b, &value, sizeof value); }
static inline void gb_u32_at(gguf_build *b, size_t at, uint32_t value) { memcpy(b->bytes + at, &value, sizeof value); }
static inline void gb_u64_at(gguf_build *b, size_t at, uint64_t value) { memcpy(b->bytes + at, &value, sizeof value); }

static inline void gb_fill(gguf_build *b, uint8_t value, size_t count) {
    while (count-- > 0) gb_u8(b, value);
}

static inline void gb_pad(gguf_build *b, size_t alignment) {
    while (b->size % alignment != 0) gb_u8(b, 0);
}

static inline void gb_text(gguf_build *b, const char *bytes, size_t size) {
    gb_u64(b, size);
    gb_raw(b, bytes, size);
}

static inline void gb_string(gguf_build *b, const char *text) { gb_text(b, text, strlen(text)); }

static inline void gb_header(gguf_build *b, uint32_t version, uint64_t tensor_count, uint64_t kv_count) {
    gb_raw(b, "GGUF", 4);
    gb_u32(b, version);
    gb_u64(b, tensor_count);
    gb_u64(b, kv_count);
}

/* Key and value type; the value must follow. */
static inline void gb_key(gguf_build *b, const char *key, uint32_t type) {
    gb_string(b, key);
    gb_u32(b, type);
}

static inline void gb_kv(gguf_build *b, const char *key, uint32_t type, const void *value, size_t size) {
    gb_key(b, key, type);
    gb_raw(b, value, size);
}

static inline void gb_kv_u32(gguf_build *b, const char *key, uint32_t value) {
    gb_kv(b, key, SPK_KV_U32, &value, sizeof value);
}

static inline void gb_kv_u16(gguf_build *b, const char *key, uint16_t value) {
    gb_kv(b, key, SPK_KV_U16, &value, sizeof value);
}

static inline void gb_kv_f32(gguf_build *b, const char *key, float value) {
    gb_kv(b, key, SPK_KV_F32, &value, sizeof value);
}

static inline void gb_kv_string(gguf_build *b, const char *key, const char *value) {
    gb_key(b, key, SPK_KV_STRING);
    gb_string(b, value);
}

/* The three entries of a part of a split model; `no` counts from 0. */
static inline void gb_kv_split(gguf_build *b, uint16_t no, uint16_t count, int32_t total_tensor_count) {
    gb_kv_u16(b, "split.no", no);
    gb_kv_u16(b, "split.count", count);
    gb_kv(b, "split.tensors.count", SPK_KV_I32, &total_tensor_count, sizeof total_tensor_count);
}

/* Key and head of an array; the elements must follow. */
static inline void gb_array(gguf_build *b, const char *key, uint32_t element_type, uint64_t count) {
    gb_key(b, key, SPK_KV_ARRAY);
    gb_u32(b, element_type);
    gb_u64(b, count);
}

/* Everything of an info after its name. */
static inline void gb_tensor_rest(gguf_build *b, uint32_t type, uint64_t offset, const uint64_t *dims,
                                  uint32_t dim_count) {
    gb_u32(b, dim_count);
    gb_raw(b, dims, dim_count * sizeof *dims);
    gb_u32(b, type);
    gb_u64(b, offset);
}

static inline void gb_tensor(gguf_build *b, const char *name, uint32_t type, uint64_t offset, const uint64_t *dims,
                             uint32_t dim_count) {
    gb_string(b, name);
    gb_tensor_rest(b, type, offset, dims, dim_count);
}

static inline void gb_save(const gguf_build *b, const char *path) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || (b->size > 0 && fwrite(b->bytes, 1, b->size, file) != b->size) || fclose(file) != 0) {
        perror(path);
        abort();
    }
}

static inline void gb_free(gguf_build *b) {
    free(b->bytes);
    *b = (gguf_build){ NULL, 0, 0 };
}

/* All of a file; without it there is nothing to test. */
static inline gguf_build gb_read(const char *path) {
    gguf_build b = { 0 };
    uint8_t chunk[65536];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        exit(1);
    }
    for (size_t got; (got = fread(chunk, 1, sizeof chunk, file)) > 0;) gb_raw(&b, chunk, got);
    (void)fclose(file);
    return b;
}

/* A new directory; gb_remove_dir removes it and the files in it. */
static inline void gb_make_dir(char dir[GB_PATH_MAX]) {
    const char *parent = getenv("TMPDIR");
    (void)snprintf(dir, GB_PATH_MAX, "%s/spk-test-XXXXXX", parent != NULL ? parent : "/tmp");
    if (mkdtemp(dir) == NULL) {
        perror(dir);
        abort();
    }
}

/* DIR/NAME */
static inline const char *gb_path(char path[GB_PATH_MAX], const char *dir, const char *name) {
    if (snprintf(path, GB_PATH_MAX, "%s/%s", dir, name) >= GB_PATH_MAX) abort();
    return path;
}

/* Number of files in a directory, hidden ones too: tells whether a temporary file was left. */
static inline int gb_file_count(const char *dir) {
    DIR *list = opendir(dir);
    int  count = 0;
    if (list == NULL) abort();
    while (readdir(list) != NULL) count++;
    closedir(list);
    return count - 2;                                    /* . and .. */
}

static inline void gb_remove_dir(const char *dir) {
    DIR *list = opendir(dir);
    char path[GB_PATH_MAX];
    if (list == NULL) abort();
    for (struct dirent *entry; (entry = readdir(list)) != NULL;)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            (void)remove(gb_path(path, dir, entry->d_name));
    closedir(list);
    (void)rmdir(dir);
}

#endif
