#!/usr/bin/env bash
# All that is measured on a GPU, in less than 8 minutes on an H200: the tests that need one, the probes and
# the engine. JSON files go to $OUT, or to the folder gpu-results.
#
#     benchmarks/gpu.sh                        on the first visible GPU
#     benchmarks/gpu.sh --tiny --device cpu    anywhere, in less than a minute: shows that all of it runs
#
# PYTHON names the interpreter; the project need not be installed in it.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-gpu-results}
device=cuda
quick=()
tests=(tests/gpu tests/engine/test_triton.py tests/engine/test_cuda_graphs.py tests/engine/test_device_sampler.py)
while [ $# -gt 0 ]; do
  case $1 in
    --tiny) quick=(--quick) tests=(tests/gpu tests/engine/test_device_sampler.py) ;;
    --device) device=$2 && shift ;;
    *) echo "unknown option $1; see the first lines of benchmarks/gpu.sh" >&2 && exit 2 ;;
  esac
  shift
done
[ "$device" = cpu ] && export TRITON_INTERPRET=1
export OMP_NUM_THREADS=1 PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"

failed=0
step() {
  local name=$1 began=$SECONDS
  shift
  "$@" || { echo "FAILED: $name" >&2 && failed=1; }
  echo "== $name: $((SECONDS - began)) s"
}
step tests "$python" -m pytest -W default -p no:cacheprovider --timeout 300 "${tests[@]}"
step probes "$python" benchmarks/gpu_probes.py "${quick[@]}" --device "$device" --json "$out/gpu_probes.json"
step engine "$python" benchmarks/gpu_engine.py "${quick[@]}" --device "$device" --json "$out/gpu_engine.json"
exit $failed
