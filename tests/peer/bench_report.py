#!/usr/bin/env python3
"""Print the table of tests/peer/bench.sh from its log.

usage: bench_report.py LOG COMMIT
"""
import datetime
import json
import os
import statistics
import sys


def main():
    path, commit = sys.argv[1:]
    values, theirs, ours = {}, {"prompt": [], "decode": []}, {"prompt": [], "decode": []}
    share = []
    for line in open(path):
        key, value = line.rstrip("\n").split(" ", 1)
        if key == "theirs":
            run = json.loads(value)
            theirs["prompt" if run["n_prompt"] else "decode"].append(run["avg_ts"])
        elif key == "ours":
            model = json.loads(value)["models"][0]
            ours["prompt"].append(model["prefill"]["tok_per_s"])
            ours["decode"].append(model["decode"][0]["tok_per_s"])
            share.append(model["decode"][0]["fraction_of_ceiling"])
        else:
            values.setdefault(key, []).append(float(value))
    median = {key: statistics.median(v) for key, v in values.items()}
    size, weights = median["model_bytes"] / 1e9, median["requant_weights"] / 1e6
    rows = [
        ("decode, 32 tokens", "tok/s", ours["decode"], theirs["decode"], "llama.cpp"),
        ("prompt, 64 tokens", "tok/s", ours["prompt"], theirs["prompt"], "llama.cpp"),
        ("requantize to Q4_K, file to file", "M weights/s", [weights / s for s in values["our_requant_s"]],
         [weights / s for s in values["their_requant_s"]], "llama.cpp"),
        ("... with --effort fast", "M weights/s", [weights / s for s in values["our_fast_s"]],
         [weights / s for s in values["their_requant_s"]], "llama.cpp"),
        ("pack natively", "GB/s", [size / s for s in values["pack_s"]], [size / s for s in values["write_s"]],
         "dd with fsync"),
    ]
    cpu = next((s.split(":", 1)[1].strip() for s in open("/proc/cpuinfo") if s.startswith("model name")), "unknown CPU")
    threads = os.environ["SPK_BENCH_THREADS"]
    print(f"{cpu}, {os.cpu_count()} CPUs, {threads} threads; {datetime.date.today()}; commit {commit}")
    print(f"model: {size:.2f} GB, 4 layers of Qwen3.6-35B-A3B, random weights; {weights:.0f} M weights requantized")
    print(f"median of {len(values['pack_s'])} runs, lowest and highest in brackets\n")
    print("| | unit | spk | peer | ratio |\n|---|---|---:|---:|---:|")
    for name, unit, a, b, peer in rows:
        cells = [f"{statistics.median(v):.4g} [{min(v):.4g} {max(v):.4g}]" for v in (a, b)]
        ratio = statistics.median(a) / statistics.median(b)
        print(f"| {name} | {unit} | {cells[0]} | {cells[1]} ({peer}) | {ratio:.2f} |")
    print(f"\nspk's decode reads weights at {100 * statistics.median(share):.0f} % of the measured read bandwidth")


if __name__ == "__main__":
    main()
