#!/usr/bin/env bash
# Set-up, step by step:  setup/install.sh PYTHON VENV      as `make setup` calls it, after setup/check.sh
# What pip and compilers print goes into VENV/setup.log, and is shown where a step fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2
mkdir -p "$venv"
log=$venv/setup.log
: > "$log"

step() { # NUMBER WHAT COMMAND...: run a command, its output in the log; says what it is and how long it took
  local what=$2 began=$SECONDS
  printf 'set-up, %s of 4: %s ... ' "$1" "$what"
  shift 2
  echo "== $what: $*" >> "$log"
  if "$@" >> "$log" 2>&1; then
    echo "$((SECONDS - began)) s"
  else
    echo "failed"
    return 1
  fi
}
needed() { # the same; without it there is no going on
  step "$@" || {
    tail -n 20 "$log" >&2
    echo "error: set-up failed. The end of its log is above, all of it in $log. Once that is mended: make setup" >&2
    exit 1
  }
}
collectives() { # DeepSpeed would compile them in the first run that uses them, and that run would be timed with it.
  local folder
  folder=$(realpath "$venv")/torch_extensions # this environment's own, as in workflow/scripts/lockstep/run/runs.py
  rm -rf "$folder" # a compilation that was killed leaves a lock, for which the next one would wait for ever
  TORCH_EXTENSIONS_DIR=$folder PATH="$(realpath "$venv/bin"):$PATH" DS_ACCELERATOR=cpu "$venv/bin/python" -c "
import deepspeed
deepspeed.accelerator.get_accelerator().create_op_builder('ShareMemCommBuilder').load()"
}

needed 1 "a Python environment in $venv" "$python" -m venv "$venv"
needed 2 "the packages of requirements.txt and requirements-dev.txt" "$venv/bin/python" -m pip install --disable-pip-version-check \
  --progress-bar off -r requirements.txt -r requirements-dev.txt -c constraints.txt
step 3 "Horovod, built from its source" docker/build-horovod.sh "$venv/bin/python" \
  || echo "note: Horovod's row is left out: $(grep '^error' "$log" || echo "see $log"). Again: make horovod" >&2
step 4 "DeepSpeed's collectives for CPUs, compiled" collectives \
  || echo "note: DeepSpeed's row runs without them, and says so; see $log" >&2
