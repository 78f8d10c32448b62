#!/usr/bin/env bash
# The first hour on a GPU, in stages; docs/gpu.md lists them. Figures go to $OUT, or to the folder gpu-results.
#
#     benchmarks/gpu.sh --ten-minutes          environment, gradient, demo, arrivals
#     benchmarks/gpu.sh                        everything, on the first visible GPU
#     benchmarks/gpu.sh --only kernels fsdp    some stages; --list names them
#     benchmarks/gpu.sh --tiny --device cpu    anywhere, in a minute: shows that all of it runs
#
# PYTHON names the interpreter; the project need not be installed in it. WHEELS names a folder of wheels that
# the interpreter lacks.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH=$site:$PYTHONPATH
fi
"$python" benchmarks/gpu_hour.py "$@"
