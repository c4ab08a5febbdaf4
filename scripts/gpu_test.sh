#!/usr/bin/env bash
# Runs the tests marked `gpu` against a wheel, with this machine's own python3 and nothing installed:
#   scripts/gpu_test.sh WHEEL [tests/test_....py or other arguments of pytest]
# MARK=... selects others. The wheel and a copy of the tests share a temporary folder, so that the
# checkout's jax_hpc, which has no extension, is never on the path.
set -euo pipefail

wheel=$1
shift
checkout=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m zipfile -e "$wheel" "$work"
cp -r "$checkout/tests" "$checkout/pyproject.toml" "$work"
for path in "$checkout"/*; do
  name=$(basename "$path")
  # Whatever else a test may read; not what the wheel brings.
  [[ -e $work/$name || $name == build ]] || ln -s "$path" "$work/$name"
done

cd "$work"
JAX_HPC_REQUIRE_GPU=1 PYTHONSAFEPATH=1 PYTHONPATH=$work python3 -m pytest -p no:cacheprovider -p no:benchmark -m "${MARK:-gpu}" "${@:-tests}"
