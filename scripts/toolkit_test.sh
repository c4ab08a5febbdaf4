#!/usr/bin/env bash
# Builds and installs jax_hpc in a fresh environment, as `pip install .` does on a machine without a
# CUDA toolkit, with NVIDIA's compiler wheels; checks the extension that results.
set -euo pipefail

python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The directories of PATH that hold no nvcc.
path=
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
  [[ -e $folder/nvcc ]] || path+=${path:+:}$folder
done

echo "== fresh environment without nvcc: $work"
"$python" -m venv "$work/venv"
env -u CUDACXX -u CUDA_HOME -u CUDA_PATH PATH="$path" JAX_HPC_CUDA=wheels \
  "$work/venv/bin/python" -m pip install -v . 2>&1 | tee "$work/log" |
  { grep --line-buffered -E '^ *(jax_hpc:|Collecting|\[[0-9]+/|-- The CUDA|Successfully|ERROR|error)' || true; }
grep -q "jax_hpc: building the CUDA extension with NVIDIA's compiler wheels" "$work/log"

cd "$work"
"$work/venv/bin/python" - <<'END'
import jax_hpc
from jax_hpc import _ext, models

info = _ext.build_info()
assert info["cuda"] == "13.0" and info["architecture"] == "90a-real", info
assert "site-packages" in models.__file__, models.__file__
assert isinstance(_ext.device_info(), list)
print(f"toolkit-test passed: jax_hpc {jax_hpc.__version__}, {info}")
END
