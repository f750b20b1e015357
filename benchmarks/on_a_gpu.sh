#!/usr/bin/env bash
# Measure on a machine with a GPU what docs/performance.md wants to know, and ask nobody:
#   benchmarks/on_a_gpu.sh FOLDER        some 30 minutes; all results go to FOLDER as they come
# Run it in the project's folder, where an environment is set up. Each part has its own time; one that fails ends none of
# the others, and the exit code is 1.
set -uo pipefail
out=$(realpath -m "${1:?give a folder for the results}")
mkdir -p "$out"
export PATH=$PWD/.venv/bin:$PATH PYTHONPATH=$PWD/workflow/scripts:$PWD
failed=0

part() { # part NAME SECONDS COMMAND...: its screen goes to NAME.log
  local name=$1 seconds=$2
  shift 2
  echo "$name: $*"
  timeout --kill-after=30 "$seconds" "$@" > "$out/$name.log" 2>&1 && return
  echo "$name: exit code $?, see $out/$name.log"
  failed=1
}

part machine 60 nvidia-smi
part steps 420 python3 -m benchmarks gpu --minutes 6 --out "$out"
part accept 540 python3 workflow/scripts/accept.py --minutes 8 --results "$out/accept"
# Horovod sums by NCCL only where it was built so: docker/build-horovod.sh.
part bench 900 python3 -m snakemake --cores all --configfile config/gpu.yaml benchmarks/on_a_gpu.yaml
cp results/on_a_gpu/report.html results/on_a_gpu/summary.csv "$out" || failed=1
exit "$failed"
