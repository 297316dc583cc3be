/* tests/test_config.c - a pack's CONFIG must be the one that its META and TENSORS give: with every digest right, another one
 * would decode with another model, silently. */
#include "tests/convert_build.h"
#include "tests/spk_build.h"

#include "requant/repair.h"
#include "runtime/runtime.h"

static spk_status open_as_model(const char *path) {
    const spk_model_options options = { .backend = SPK_BACKEND_REF, .thread_count = 1 };
    spk_model *opened = NULL;
    spk_status status = spk_model_open(path, &options, &opened, &err);
    if (status == SPK_OK) spk_model_close(opened);
    return status;
}

static spk_status repair(const char *path) {
    spk_gguf *source = NULL;
    spk_repair_result result;
    CHECK_OK(spk_gguf_open(TINY36, &source, &err), err);
    spk_status status = spk_repair(path, &(spk_repair_options){ .source = source }, &result, &err);
    spk_gguf_close(source);
    return status;
}

static image native_pack(void) {
    CHECK_OK(pack(TINY36, pack_path, &(pack_request){ .recipe = "native", .replace = true }), err);
    return read_image(pack_path);
}

static const struct { size_t offset; uint32_t value; const char *text; } changes[] = {
    { offsetof(spk_model_config, arch), 3, "arch is 3, expected 1" },
    { offsetof(spk_model_config, layer_count), 7, "layer_count is 7, expected 8" },
    { offsetof(spk_model_config, mtp_layer_count), 1, "mtp_layer_count is 1, expected 0" },
    { offsetof(spk_model_config, context_length), 1 << 20, "context_length is 1048576, expected 4096" },
    { offsetof(spk_model_config, vocab_size), 4095, "vocab_size is 4095, expected 4096" },
    { offsetof(spk_model_config, hidden_size), 128, "hidden_size is 128, expected 256" },
    { offsetof(spk_model_config, head_count), 2, "head_count is 2, expected 4" },
    { offsetof(spk_model_config, kv_head_count), 1, "kv_head_count is 1, expected 2" },
    { offsetof(spk_model_config, head_dim), 32, "head_dim is 32, expected 64" },
    { offsetof(spk_model_config, rope_dim), 64, "rope_dim is 64, expected 16" },
    { offsetof(spk_model_config, rope_base), 0x461c4000, "rope_base is 10000, expected 10000000" },
    { offsetof(spk_model_config, rms_eps), 0x3727c5ac, "rms_eps is 9.99999975e-06, expected 9.99999997e-07" },
    { offsetof(spk_model_config, rms_eps), 0x358637be, "rms_eps is 1.00000011e-06, expected 9.99999997e-07" },   /* one bit */
    { offsetof(spk_model_config, full_attention_interval), 2, "full_attention_interval is 2, expected 4" },
    { offsetof(spk_model_config, has_attention_gate), 0, "has_attention_gate is 0, expected 1" },
    { offsetof(spk_model_config, gdn_k_head_count), 4, "gdn_k_head_count is 4, expected 2" },
    { offsetof(spk_model_config, gdn_v_head_count), 2, "gdn_v_head_count is 2, expected 4" },
    { offsetof(spk_model_config, gdn_k_dim), 32, "gdn_k_dim is 32, expected 64" },
    { offsetof(spk_model_config, gdn_v_dim), 128, "gdn_v_dim is 128, expected 64" },
    { offsetof(spk_model_config, conv_kernel), 2, "conv_kernel is 2, expected 4" },
    { offsetof(spk_model_config, expert_used_count), 1, "expert_used_count is 1, expected 2" },
    { offsetof(spk_model_config, expert_ff_size), 128, "expert_ff_size is 128, expected 256" },
    { offsetof(spk_model_config, shared_ff_size), 0, "shared_ff_size is 0, expected 256" },
    { offsetof(spk_model_config, dense_ff_size), 256, "dense_ff_size is 256, expected 0" },
    { offsetof(spk_model_config, is_tied), 1, "is_tied is 1, expected 0" },
};

static void every_field_is_compared_with_the_metadata(void) {
    enum { EXPERT_COUNT = 1 };           /* is compared with the tensors as soon as the pack opens: test_spk_damage.c */
    uint64_t seen = 0;
    image i = native_pack();
    CHECK_OK(open_as_model(pack_path), err);
    for (size_t c = 0; c < sizeof changes / sizeof *changes; c++) {
        uint8_t *at = i.bytes + section_of(&i, SPK_SECTION_CONFIG)->offset_bytes + changes[c].offset;
        uint32_t kept;
        char text[120];
        memcpy(&kept, at, sizeof kept);
        memcpy(at, &changes[c].value, sizeof kept);
        seal(&i);
        write_image(pack_path, i.bytes, i.size_bytes);
        (void)snprintf(text, sizeof text, "%s: CONFIG: %s,", pack_path, changes[c].text);
        CHECK(open_as_model(pack_path) == SPK_E_MISMATCH && strstr(err.text, text) != NULL, "expected '%s': %s", text, err.text);
        CHECK(repair(pack_path) == SPK_E_MISMATCH && strstr(err.text, text) != NULL, "to repair it, expected '%s': %s", text, err.text);
        memcpy(at, &kept, sizeof kept);
        seen |= UINT64_C(1) << changes[c].offset / 4;
    }
    CHECK(__builtin_popcountll(seen) == offsetof(spk_model_config, reserved) / 4 - EXPERT_COUNT, "every field has a line: %#lx", (unsigned long)seen);
    seal(&i);
    write_image(pack_path, i.bytes, i.size_bytes);
    CHECK_OK(open_as_model(pack_path), err);
    free(i.bytes);
}

/* The other way round: META says something else, or nothing. */
static void metadata_must_describe_the_model(void) {
    static const struct { const char *key; size_t at; uint8_t value; const char *text; } edits[] = {
        { "qwen35moe.expert_used_count", 4, 3, "CONFIG: expert_used_count is 2, expected 3" },
        { "qwen35moe.attention.head_count_kv", 4, 4, "blk.3.attn_k.weight" },
        { "qwen35moe.block_count", (size_t)-1, 'T', "key 'qwen35moe.block_count' is missing" },
    };
    spk_pack *opened = NULL;
    image i = native_pack();
    CHECK_OK(spk_pack_open(pack_path, &opened, &err), err);
    const spk_kv_set *kvs = spk_pack_kvs(opened);
    uint64_t kv_bytes_size = (uint64_t)(kvs->items[kvs->count - 1].entry + kvs->items[kvs->count - 1].entry_bytes - kvs->items[0].entry);
    for (size_t e = 0; e < sizeof edits / sizeof *edits; e++) {
        uint8_t *kv_copy = malloc(kv_bytes_size);
        memcpy(kv_copy, kvs->items[0].entry, kv_bytes_size);
        uint8_t *key = memmem(kv_copy, kv_bytes_size, edits[e].key, strlen(edits[e].key));
        CHECK(key != NULL, "%s", edits[e].key);
        key[strlen(edits[e].key) + edits[e].at] = edits[e].value;
        spk_pack_writer_options o = { .path = other_path, .replace = true, .config = spk_pack_config(opened), .kv_bytes = kv_copy,
                                      .kv_bytes_size = kv_bytes_size, .kv_count = kvs->count,
                                      .tensor_count = spk_pack_tensor_count(opened) };
        spk_pack_writer *writer = NULL;
        for (uint32_t p = 1; p <= SPK_PLACE_COUNT; p++) (void)spk_pack_section(opened, p, &o.section_bytes[p - 1]);
        CHECK_OK(spk_pack_writer_begin(&o, &writer, &err), err);
        for (uint32_t p = 1; p <= SPK_PLACE_COUNT; p++) {
            uint64_t size_bytes;
            const uint8_t *section = spk_pack_section(opened, p, &size_bytes);
            CHECK_OK(spk_pack_writer_append(writer, section, size_bytes, &err), err);
        }
        CHECK_OK(spk_pack_writer_commit(writer, spk_pack_tensors(opened), spk_pack_provenance(opened), &err), err);
        spk_status status = open_as_model(other_path);
        CHECK(status != SPK_OK && strstr(err.text, edits[e].text) != NULL && strstr(err.text, other_path) != NULL, "expected '%s': %s",
              edits[e].text, err.text);
        free(kv_copy);
    }
    spk_pack_close(opened);
    free(i.bytes);
}

int main(void) {
    if (!open_folder()) return 1;
    RUN(every_field_is_compared_with_the_metadata);
    RUN(metadata_must_describe_the_model);
    close_folder();
    return CHECK_EXIT();
}
