#!/usr/bin/env python3
"""A reader of .spk packs written from formats/spk-format.md alone: the test of that page.

  spk_reader.py PACK                  what it holds, as JSON (the fields of spk-info --json --tensors)
  spk_reader.py PACK --source GGUF    compare metadata and the rows of all copied tensors with the source
  spk_reader.py --example PAGE        decode the worked example of the page, as JSON

Checks structure, not digests (the standard library has no XXH3); of metadata it needs the zstd command.
"""
import json, math, struct, subprocess, sys

PROVENANCE = {"source.name": bytes, "source.bytes": int, "source.xxh3_128": bytes, "source.gguf_version": int,
              "source.alignment": int, "recipe.name": bytes, "recipe.text": bytes, "imatrix.name": bytes,
              "tool.version": bytes}
SECTIONS = {1: "STATIC", 2: "EXPERTS", 3: "EMBEDDING", 4: "EXTRA", 16: "CONFIG", 17: "TENSORS", 18: "META",
            19: "PROVENANCE", 20: "CHUNKS"}
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
         6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
         12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
         23: ("IQ4_XS", 256, 136)}
LAYOUTS = {1: "ROWS", 2: "T32"}
TILE_BYTES = {"Q4_K": 4608, "Q5_K": 5632, "Q6_K": 6720, "Q8_0": 8704}
CHUNK = 4 << 20


def check(condition, rule, what):
    if not condition:
        sys.exit(f"R{rule}: {what}")


def read_kvs(data, count, at=0):
    """Entries of GGUF metadata as {key: value}, and where they end."""
    sizes = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

    def scalar(kind, at):
        if kind == 8:
            size = struct.unpack_from("<Q", data, at)[0]
            check(at + 8 + size <= len(data), 14, "string past the end")
            return bytes(data[at + 8:at + 8 + size]), at + 8 + size
        return struct.unpack_from(sizes[kind], data, at)[0], at + struct.calcsize(sizes[kind])

    entries = {}
    for _ in range(count):
        key, at = scalar(8, at)
        kind, at = scalar(4, at)
        if kind == 9:
            kind, at = scalar(4, at)
            number, at = scalar(10, at)
            value = []
            for _ in range(number):
                item, at = scalar(kind, at)
                value.append(item)
        else:
            value, at = scalar(kind, at)
        check(key and key not in entries, 14, f"key {key}")
        entries[key.decode()] = value
    return entries, at


def read_tensor(entry):
    name = entry[:64].rstrip(b"\0")
    check(1 <= len(name) <= 63 and all(c >= 0x20 and c != 0x7f for c in name), 15, f"name {name}")
    kind, source, layout, section, dim_count, reserved, *dims = struct.unpack_from("<6I4Q", entry, 64)
    offset, unit_stride, matrix_stride, rmse, worst, cosine = struct.unpack_from("<3Q3d", entry, 120)
    check(kind in TYPES and source in TYPES and layout in LAYOUTS, 16, f"type or layout of {name}")
    check(1 <= dim_count <= 4 and min(dims) >= 1 and set(dims[dim_count:]) <= {1}, 17, f"dims of {name}")
    check(dims[0] % TYPES[kind][1] == 0, 17, f"columns of {name}")
    check(reserved == 0 and not any(entry[168:192]) and all(map(math.isfinite, (rmse, worst, cosine))), 20, name)
    return {"name": name.decode(), "type": TYPES[kind][0], "dims": dims[:dim_count],
            "bytes": math.prod(dims) // TYPES[kind][1] * TYPES[kind][2], "source_type": TYPES[source][0],
            "layout": LAYOUTS[layout], "section": SECTIONS[section], "offset_bytes": offset,
            "unit_stride_bytes": unit_stride, "matrix_stride_bytes": matrix_stride, "relative_rmse": rmse,
            "max_abs_error": worst, "cosine": cosine}


class Pack:
    def __init__(self, path):
        self.data = data = memoryview(open(path, "rb").read())
        check(len(data) >= 4096 and data[:8] == b"\x8fSPK\r\n\x1a\n", 1, "magic")
        self.major, self.minor, required, _, count, size = struct.unpack_from("<HHIIIQ", data, 8)
        check(self.major == 1, 2, "version")
        check(required == 0, 4, "required features")
        check(size == len(data), 5, "file size")
        check(1 <= count <= 63 and not any(data[64 + 64 * count:4096]), 6, "section table")
        self.root = data[32:48].hex()
        self.sections, at = {}, 4096
        for i in range(count):
            ident, flags, offset, stored, raw = struct.unpack_from("<IIQQQ", data, 64 + 64 * i)
            items, reserved = struct.unpack_from("<QQ", data, 64 + 64 * i + 48)
            check(ident not in self.sections and (ident in SECTIONS) == (flags == 0), 8, f"section {ident}")
            check(offset == at and stored >= 1 and offset + stored <= size, 9, f"section {ident}")
            at = -(-(offset + stored) // 4096) * 4096
            check(reserved == 0 and (ident == 18 or raw == stored), 10, f"section {ident}")
            check(not any(data[offset + stored:at]), 11, f"padding of section {ident}")
            self.sections[ident] = {"name": SECTIONS.get(ident, "unknown"), "id": ident, "offset_bytes": offset,
                                    "stored_bytes": stored, "raw_bytes": raw, "items": items,
                                    "digest": data[64 + 64 * i + 32:64 + 64 * i + 48].hex()}
        check(at == size, 9, "end of the last section")
        check({16, 17, 18, 19, 20} <= set(self.sections), 8, "a section is missing")
        chunks = [s["items"] for i, s in self.sections.items() if i <= 4]
        check(chunks == [-(-s["stored_bytes"] // CHUNK) for i, s in self.sections.items() if i <= 4], 10, "chunks")
        check(self.sections[20]["items"] == sum(chunks) and len(self.section(20)) == 16 * sum(chunks), 10, "CHUNKS")
        check(len(self.section(16)) == 128 and not any(self.section(16)[100:]), 13, "CONFIG")
        expert_count = struct.unpack_from("<I", self.section(16), 76)[0]
        check(expert_count > 0 or 2 not in self.sections, 13, "EXPERTS without experts")
        directory = self.section(17)
        check(len(directory) == 192 * self.sections[17]["items"], 10, "TENSORS")
        self.tensors = [read_tensor(bytes(directory[i:i + 192])) for i in range(0, len(directory), 192)]
        for t in self.tensors:
            check(t["section"] != "EXPERTS" or math.prod(t["dims"][2:]) == expert_count, 19, t["name"])
        records, end = read_kvs(self.section(19), self.sections[19]["items"])
        check(end == len(self.section(19)), 22, "PROVENANCE")
        check(all(type(records.get(key)) is kind for key, kind in PROVENANCE.items()), 22, "a record of PROVENANCE")
        self.provenance = {k: v.decode() if isinstance(v, bytes) else v for k, v in records.items()}

    def section(self, ident):
        s = self.sections[ident]
        return self.data[s["offset_bytes"]:s["offset_bytes"] + s["stored_bytes"]]

    def metadata(self):
        check(self.section(18)[:4] == b"\x28\xb5\x2f\xfd", 14, "META is no zstd frame")   # zstd skips some others
        raw = subprocess.run(["zstd", "-dc"], input=self.section(18), stdout=subprocess.PIPE, check=True).stdout
        check(len(raw) == self.sections[18]["raw_bytes"], 14, "META")
        return raw

    def matrix(self, t, index):
        """The GGML rows of one matrix."""
        data = self.section(next(i for i, name in SECTIONS.items() if name == t["section"]))
        _, weights, block_bytes = next(v for v in TYPES.values() if v[0] == t["type"])
        columns, rows = (t["dims"] + [1])[:2]
        start, stride, row_bytes = t["offset_bytes"] + index * t["matrix_stride_bytes"], t["unit_stride_bytes"], \
            columns // weights * block_bytes
        if t["layout"] == "ROWS":
            return b"".join(data[start + r * stride:start + r * stride + row_bytes] for r in range(rows))
        k = columns // 256
        p = min(k & -k, 32)
        out = [None] * (rows * k)
        for tile in range(-(-rows // (32 // p)) * (k // p)):
            at = start + tile * stride
            check(at + TILE_BYTES[t["type"]] <= len(data), 19, t["name"])
            for lane in range(32):
                row, column = tile // (k // p) * (32 // p) + lane // p, tile % (k // p) * p + lane % p
                if row < rows:
                    out[row * k + column] = super_block(t["type"], data, at, lane)
        return b"".join(out)


def super_block(kind, data, tile, lane):
    def chunks(first, count):
        return b"".join(data[a:a + 16] for a in range(tile + 512 * first + 16 * lane,
                                                      tile + 512 * (first + count) + 16 * lane, 512))
    if kind == "Q6_K":
        return chunks(1, 8) + chunks(9, 4) + chunks(0, 1) + bytes(data[tile + 6656 + 2 * lane:][:2])
    if kind == "Q8_0":
        scales = chunks(0, 1)
        return b"".join(scales[2 * i:2 * i + 2] + chunks(1 + 2 * i, 2) for i in range(8))
    return chunks(0, TILE_BYTES[kind] // 512)


def compare_with_source(pack, path):
    data = memoryview(open(path, "rb").read())
    tensor_count, kv_count = struct.unpack_from("<QQ", data, 8)
    kvs, at = read_kvs(data, kv_count, 24)
    assert bytes(data[24:at]) == pack.metadata() and kv_count == pack.sections[18]["items"], "metadata differ"
    offsets = {}
    for _ in range(tensor_count):
        length = struct.unpack_from("<Q", data, at)[0]
        name = bytes(data[at + 8:at + 8 + length]).decode()
        at += 8 + length
        at += 4 + 8 * struct.unpack_from("<I", data, at)[0]
        offsets[name], at = struct.unpack_from("<Q", data, at + 4)[0], at + 12
    alignment = kvs.get("general.alignment", 32)
    start = -(-at // alignment) * alignment
    assert list(offsets) == [t["name"] for t in pack.tensors], "tensors or their order differ"
    copied = [t for t in pack.tensors if t["type"] == t["source_type"]]
    for t in copied:
        rows = b"".join(pack.matrix(t, m) for m in range(math.prod(t["dims"][2:])))
        assert rows == data[start + offsets[t["name"]]:][:t["bytes"]], f"{t['name']} differs"
    print(f"{len(copied)} of {len(pack.tensors)} tensors equal the source's")


def main(arguments):
    if arguments[0] == "--example":
        text = bytes.fromhex(open(arguments[1]).read().split("```hex")[1].split("```")[0])
        print(json.dumps({"header": struct.unpack_from("<8sHHIIIQ", text)[1:], "tensor": read_tensor(text[32:])}))
        return
    pack = Pack(arguments[0])
    if arguments[1:2] == ["--source"]:
        compare_with_source(pack, arguments[2])
    else:
        print(json.dumps({"file_bytes": len(pack.data), "version_major": pack.major, "version_minor": pack.minor,
                          "root": pack.root, "sections": list(pack.sections.values()), "tensors": pack.tensors,
                          "provenance": pack.provenance}))


main(sys.argv[1:])
