#!/usr/bin/env bash
# Write docker/locks/*.txt: every Python package of every image, each with its hashes, resolved together.
#   make locks       after a change of requirements*.txt or constraints.txt
# CPU_WHEELS is where PyTorch's CPU build is found: an index, or a folder of wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
cpu_wheels=${CPU_WHEELS:-https://download.pytorch.org/whl/cpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/uv"
"$work/uv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9
if [ -d "$cpu_wheels" ]; then from=(--find-links "$cpu_wheels"); else from=(--index "$cpu_wheels" --index-strategy unsafe-best-match); fi

rm -f docker/locks/*.txt # or they would be preferred to what is newer
mkdir -p docker/locks

lock() { # LOCK LINES [ARGUMENTS...]: resolve the requirements in LINES
  local name=$1 lines=$2
  shift 2
  printf '%s\n' "$lines" > "$work/$name.in"
  "$work/uv/bin/uv" pip compile --quiet --no-config --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
    --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
    --constraint constraints.txt "$@" --output-file "docker/locks/$name.txt" "$work/$name.in"
}

compiled='^(deepspeed|horovod)=='
requirements=$(grep -v '^#' requirements.txt)
without_compiled=$(grep -vE "$compiled|^snakemake==" <<< "$requirements")
tests=$(grep -E '^(pytest|hypothesis|trustme)==' requirements-dev.txt)
build=$'setuptools\nwheel==0.45.1\nninja\npy-cpuinfo\npackaging\ncffi'
# What the sources of Horovod need to run; DeepSpeed's come with it.
horovod=$'cloudpickle\npsutil\npyyaml\npackaging\ncffi'

for variant in cpu cuda; do
  if [ "$variant" = cpu ]; then more=("${from[@]}"); else more=(); fi
  lock "torch-$variant" "$without_compiled" "${more[@]}"
  # All of them keep the versions of the first, so that the layers they add are small.
  more+=(--constraint "docker/locks/torch-$variant.txt")
  lock "deepspeed-$variant" "$(grep deepspeed== <<< "$requirements")" "${more[@]}" --no-emit-package deepspeed
  lock "horovod-$variant" "$horovod" "${more[@]}"
  lock "bench-$variant" "$requirements"$'\n'"$horovod"$'\n'"$tests" "${more[@]}" --no-emit-package deepspeed
done
lock compiler-cpu "$build" "${from[@]}" --constraint docker/locks/torch-cpu.txt
lock compiler-cuda "$build"$'\nnvidia-cuda-nvcc==13.0.88\nnvidia-cuda-crt==13.0.88\nnvidia-nvvm==13.0.88\nnvidia-cuda-cccl==13.0.85' --constraint docker/locks/torch-cuda.txt
lock tools 'cyclonedx-bom==7.5.0'
lock sources "$(grep deepspeed== <<< "$requirements")" --no-deps --no-binary deepspeed
