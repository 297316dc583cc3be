#!/usr/bin/env python3
"""Write a GGUF file that holds a vocabulary and no tensors, from a tokenizer.json.

usage: vocab_gguf.py TOKENIZER.json PRE OUT.gguf        PRE: qwen2 or qwen35

Added tokens are control tokens where the JSON file calls them special, else user-defined, as converters write them.
"""
import json
import struct
import sys

U32, I32, STRING, ARRAY = 4, 5, 8, 9
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def text(s):
    b = s.encode("utf-8")
    return struct.pack("<Q", len(b)) + b


def entry(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def strings(key, values):
    return entry(key, ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values)))


def main():
    source, pre, out = sys.argv[1:]
    with open(source, encoding="utf-8") as f:
        data = json.load(f)
    texts = {i: s for s, i in data["model"]["vocab"].items()}
    types = {i: NORMAL for i in texts}
    for token in data["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    count = max(texts) + 1
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(count)]
    kinds = [types.get(i, UNUSED) for i in range(count)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    end = next(t["id"] for t in data["added_tokens"] if t["content"] == "<|im_end|>")
    entries = [
        entry("general.architecture", STRING, text("qwen3")),
        entry("tokenizer.ggml.model", STRING, text("gpt2")),
        entry("tokenizer.ggml.pre", STRING, text(pre)),
        strings("tokenizer.ggml.tokens", tokens),
        entry("tokenizer.ggml.token_type", ARRAY, struct.pack(f"<IQ{count}i", I32, count, *kinds)),
        strings("tokenizer.ggml.merges", merges),
        entry("tokenizer.ggml.eos_token_id", U32, struct.pack("<I", end)),
    ]
    with open(out, "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))


if __name__ == "__main__":
    main()
