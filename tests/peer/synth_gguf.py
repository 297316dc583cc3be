#!/usr/bin/env python3
"""Write a GGUF file with the tensors of a real model, in its types and shapes, and random weights.

usage: synth_gguf.py OUT.gguf [--model qwen36|qwen30] [--layers N] [--vocab V] [--seed S]

  qwen36  Qwen3.6-35B-A3B in the UD-Q4_K_M mix (733 tensors, 22.1 GB at 40 layers)
  qwen30  Qwen3-30B-A3B in the Q4_K_M mix (579 tensors, 18.6 GB at 48 layers)

For speed and memory only: the weights mean nothing, so no accuracy figure may come from such a file.  Needs numpy.
Blocks are cut from a 64 MiB random pool at varying offsets, so that writing runs at disk speed; their scales are set
so that weights have a standard deviation near 0.02.
"""
import argparse
import struct

import numpy as np

# name: (id, weights in a block, bytes of a block)
TYPES = {"F32": (0, 1, 4), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210)}
POOL_BYTES = 64 << 20
PIECE_BYTES = 32 << 20
ALIGNMENT = 32


def ends(vocab, embedding_type):
    return [("token_embd.weight", (2048, vocab), embedding_type), ("output_norm.weight", (2048,), "F32"),
            ("output.weight", (2048, vocab), "Q6_K")]


def qwen36(layers, vocab):
    t = ends(vocab, "Q8_0")
    for i in range(layers):
        layer = [("attn_norm.weight", (2048,), "F32"), ("post_attention_norm.weight", (2048,), "F32")]
        if (i + 1) % 4:
            layer += [("attn_qkv.weight", (2048, 8192), "Q8_0"), ("attn_gate.weight", (2048, 4096), "Q8_0"),
                      ("ssm_conv1d.weight", (4, 8192), "F32"), ("ssm_dt.bias", (32,), "F32"), ("ssm_a", (32,), "F32"),
                      ("ssm_beta.weight", (2048, 32), "F32"), ("ssm_alpha.weight", (2048, 32), "F32"),
                      ("ssm_norm.weight", (128,), "F32"), ("ssm_out.weight", (4096, 2048), "Q8_0")]
        else:
            layer += [("attn_q.weight", (2048, 8192), "Q8_0"), ("attn_k.weight", (2048, 512), "Q8_0"),
                      ("attn_v.weight", (2048, 512), "Q8_0"), ("attn_output.weight", (4096, 2048), "Q8_0"),
                      ("attn_q_norm.weight", (256,), "F32"), ("attn_k_norm.weight", (256,), "F32")]
        layer += [("ffn_gate_inp.weight", (2048, 256), "F32"), ("ffn_gate_exps.weight", (2048, 512, 256), "Q4_K"),
                  ("ffn_up_exps.weight", (2048, 512, 256), "Q4_K"),
                  ("ffn_down_exps.weight", (512, 2048, 256), "Q6_K" if i in (34, 38, 39) else "Q5_K"),
                  ("ffn_gate_inp_shexp.weight", (2048,), "F32"), ("ffn_gate_shexp.weight", (2048, 512), "Q8_0"),
                  ("ffn_up_shexp.weight", (2048, 512), "Q8_0"), ("ffn_down_shexp.weight", (512, 2048), "Q8_0")]
        t += [(f"blk.{i}.{name}", shape, kind) for name, shape, kind in layer]
    a = "qwen35moe."
    kv = [("general.architecture", "s", "qwen35moe"), ("general.name", "s", "Qwen3.6-35B-A3B"),
          (a + "block_count", "u", layers), (a + "context_length", "u", 262144), (a + "embedding_length", "u", 2048),
          (a + "attention.head_count", "u", 16), (a + "attention.head_count_kv", "u", 2),
          (a + "attention.key_length", "u", 256), (a + "attention.value_length", "u", 256),
          (a + "attention.layer_norm_rms_epsilon", "f", 1e-6), (a + "rope.dimension_sections", "ai", [11, 11, 10, 0]),
          (a + "rope.freq_base", "f", 1e7), (a + "rope.dimension_count", "u", 64), (a + "expert_count", "u", 256),
          (a + "expert_used_count", "u", 8), (a + "expert_feed_forward_length", "u", 512),
          (a + "expert_shared_feed_forward_length", "u", 512), (a + "ssm.conv_kernel", "u", 4),
          (a + "ssm.state_size", "u", 128), (a + "ssm.group_count", "u", 16), (a + "ssm.time_step_rank", "u", 32),
          (a + "ssm.inner_size", "u", 4096), (a + "full_attention_interval", "u", 4)]
    return t, kv, "qwen35"


def qwen30(layers, vocab):
    t = ends(vocab, "Q4_K")
    for i in range(layers):
        more = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
        q = "Q6_K" if more else "Q4_K"
        layer = [("attn_norm.weight", (2048,), "F32"), ("ffn_norm.weight", (2048,), "F32"),
                 ("attn_q.weight", (2048, 4096), "Q4_K"), ("attn_k.weight", (2048, 512), "Q4_K"),
                 ("attn_v.weight", (2048, 512), q), ("attn_output.weight", (4096, 2048), "Q4_K"),
                 ("attn_q_norm.weight", (128,), "F32"), ("attn_k_norm.weight", (128,), "F32"),
                 ("ffn_gate_inp.weight", (2048, 128), "F32"), ("ffn_gate_exps.weight", (2048, 768, 128), "Q4_K"),
                 ("ffn_up_exps.weight", (2048, 768, 128), "Q4_K"), ("ffn_down_exps.weight", (768, 2048, 128), q)]
        t += [(f"blk.{i}.{name}", shape, kind) for name, shape, kind in layer]
    a = "qwen3moe."
    kv = [("general.architecture", "s", "qwen3moe"), ("general.name", "s", "Qwen3-30B-A3B"),
          (a + "block_count", "u", layers), (a + "context_length", "u", 40960), (a + "embedding_length", "u", 2048),
          (a + "attention.head_count", "u", 32), (a + "attention.head_count_kv", "u", 4),
          (a + "attention.key_length", "u", 128), (a + "attention.value_length", "u", 128),
          (a + "attention.layer_norm_rms_epsilon", "f", 1e-6), (a + "rope.freq_base", "f", 1e6),
          (a + "expert_count", "u", 128), (a + "expert_used_count", "u", 8),
          (a + "expert_feed_forward_length", "u", 768), (a + "feed_forward_length", "u", 6144)]
    return t, kv, "qwen2"


MODELS = {"qwen36": (qwen36, 40, 248320), "qwen30": (qwen30, 48, 151936)}


def text(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def encode(key, kind, value):
    head = text(key)
    if kind == "s":
        return head + struct.pack("<I", 8) + text(value)
    if kind == "u":
        return head + struct.pack("<II", 4, value)
    if kind == "f":
        return head + struct.pack("<If", 6, value)
    if kind == "b":
        return head + struct.pack("<IB", 7, value)
    if kind == "ai":
        return head + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    return head + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def vocabulary(count):
    """Byte tokens in the printable alphabet, fillers, and three control tokens at the end."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens, extra = [], 0
    for byte in range(256):
        tokens.append(chr(byte) if byte in printing else chr(256 + extra))
        extra += byte not in printing
    tokens += [f"t{i}" for i in range(256, count - 3)] + ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return tokens, [1] * (count - 3) + [3] * 3


def size_of(shape, kind):
    _, weights, size = TYPES[kind]
    return int(np.prod(shape)) // weights * size


def header(tensors, kv):
    """Everything before the data, and the size of the data."""
    infos, offset = b"", 0
    for name, shape, kind in tensors:
        infos += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPES[kind][0], offset)
        offset += -(-size_of(shape, kind) // ALIGNMENT) * ALIGNMENT
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kv)) + b"".join(encode(*e) for e in kv) + infos
    return head + b"\0" * (-len(head) % ALIGNMENT), offset


def half(value):
    return np.array([value], dtype=np.float16).view(np.uint8)


def write_blocks(f, rng, pool, count, kind):
    size = TYPES[kind][2]
    while count:
        n = min(count, PIECE_BYTES // size)
        start = int(rng.integers(0, len(pool) - n * size))
        x = pool[start:start + n * size].reshape(n, size).copy()
        if kind == "Q8_0":
            x[:, 0:2] = half(0.02 / 73)
        elif kind == "Q4_K":
            x[:, 0:2], x[:, 2:4] = half(0.02 / 147), half(0.15 / 147)
        elif kind == "Q5_K":
            x[:, 0:2], x[:, 2:4] = half(0.02 / 288), half(0.31 / 288)
        else:
            x[:, 192:208] = 20 + x[:, 192:208] % 30
            x[:, 208:210] = half(0.02 / 648)
        x.tofile(f)
        count -= n


def write_floats(f, rng, name, count):
    if name.endswith("norm.weight"):
        x = np.ones(count)
    elif name.endswith("ssm_a"):
        x = -np.exp(rng.random(count) * 2 - 2)
    else:
        x = rng.standard_normal(count) * (0.3 if "conv1d" in name else 0.5 if "dt.bias" in name else 0.02)
    x.astype(np.float32).tofile(f)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out")
    p.add_argument("--model", choices=MODELS, default="qwen36")
    p.add_argument("--layers", type=int)
    p.add_argument("--vocab", type=int)
    p.add_argument("--seed", type=int, default=7)
    o = p.parse_args()
    make, layers, vocab = MODELS[o.model]
    vocab = o.vocab or vocab
    tensors, kv, pre = make(o.layers or layers, vocab)
    tokens, kinds = vocabulary(vocab)
    kv += [("general.file_type", "u", 15), ("general.quantization_version", "u", 2),
           ("tokenizer.ggml.model", "s", "gpt2"), ("tokenizer.ggml.pre", "s", pre),
           ("tokenizer.ggml.tokens", "as", tokens), ("tokenizer.ggml.token_type", "ai", kinds),
           ("tokenizer.ggml.merges", "as", ["t 2"]), ("tokenizer.ggml.eos_token_id", "u", vocab - 1),
           ("tokenizer.ggml.padding_token_id", "u", vocab - 3), ("tokenizer.ggml.add_bos_token", "b", 0)]
    rng = np.random.default_rng(o.seed)
    pool = rng.integers(0, 256, POOL_BYTES, dtype=np.uint8)
    head, data_bytes = header(tensors, kv)
    with open(o.out, "wb") as f:
        f.write(head)
        for name, shape, kind in tensors:
            count = int(np.prod(shape))
            if kind == "F32":
                write_floats(f, rng, name, count)
            else:
                write_blocks(f, rng, pool, count // TYPES[kind][1], kind)
            f.write(b"\0" * (-size_of(shape, kind) % ALIGNMENT))
    print(f"{o.out}: {len(head) + data_bytes} bytes, {len(tensors)} tensors")


if __name__ == "__main__":
    main()
