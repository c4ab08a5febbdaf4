#!/usr/bin/env bash
# Measures an op on a wheel's kernels, with this machine's own python3 and nothing installed:
#   scripts/gpu_bench.sh WHEEL OP [further arguments of python -m benchmarks]
# The wheel and a copy of benchmarks/ share a temporary folder, so that the checkout's jax_hpc,
# which has no extension, is never on the path. Rows go to benchmarks/results/h200/OP.jsonl, or to
# OUT_DIR/OP.jsonl, which starts as a copy of it. PEERS names wheels of other libraries that are to
# be measured too.
set -euo pipefail

wheel=$1 op=$2
shift 2
checkout=$(cd "$(dirname "$0")/.." && pwd)
kept=$checkout/benchmarks/results/h200/$op.jsonl
out=${OUT_DIR:+$(mkdir -p "$OUT_DIR" && cd "$OUT_DIR" && pwd)/$op.jsonl}
out=${out:-$kept}
if [[ ! -e $out && -e $kept ]]; then cp "$kept" "$out"; fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for unpacked in "$wheel" ${PEERS:-}; do python3 -m zipfile -e "$unpacked" "$work"; done
cp -r "$checkout/benchmarks" "$work"
ln -s "$checkout/cuda" "$work"  # part of what a row's sources are

cd "$work"
PYTHONSAFEPATH=1 PYTHONPATH=$work python3 -m benchmarks --op "$op" --out "$out" "$@"
