#!/usr/bin/env bash
# Set-up, step by step:  setup/install.sh PYTHON VENV [cpu|cuda|here]      as `make setup` calls it, after setup/check.sh
# What pip and compilers print goes into VENV/setup.log, and is shown where a step fails. VENV/.complete is left at last,
# and says which of PyTorch's builds is there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 asked=${3:-}
decided=$(setup/which_torch.sh "$asked")
read -r build why <<< "$decided"
mkdir -p "$venv"
rm -f "$venv/.complete"
log=$venv/setup.log
: > "$log"

step() { # NUMBER WHAT COMMAND...: run a command, its output in the log; says what it is and how long it took
  local what=$2 began=$SECONDS
  printf 'set-up, %s of 5: %s ... ' "$1" "$what"
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
    echo "error: set-up failed. The end of its log is above, all of it in $log. Once that is fixed: make setup${asked:+ TORCH=$asked}" >&2
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

built_for() { # which of PyTorch's builds is installed
  PYTHONPATH=workflow/scripts "$venv/bin/python" -c '
from lockstep.config.machine import built_for_gpus
print("cuda" if built_for_gpus() else "cpu")'
}

needed 1 "a Python environment in $venv" "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off)
if [ "$build" = here ]; then
  needed 2 "PyTorch as it is there, $why" setup/here.sh find "$python" "$venv/here.txt"
  setup/here.sh packages > "$venv/packages.txt"
  # Images of NVIDIA's hold pip to what they have by PIP_CONSTRAINT.
  needed 3 "the packages of requirements.txt and requirements-dev.txt" \
    env --unset=PIP_CONSTRAINT "${pip[@]}" --no-deps -r "$venv/packages.txt"
  setup/here.sh link "$venv" "$venv/here.txt" || exit 1
else
  needed 2 "PyTorch's $build build, $why" setup/torch.sh "$venv/bin/python" "$build" "$asked"
fi
grep '^note: ' "$log" >&2 || true
built=$(built_for)
if [ "$build" = here ]; then
  built=here
elif [ -n "$asked" ] && [ "$asked" != "$built" ]; then
  echo "error: TORCH=$asked is asked for, and pip's index has PyTorch's $built build only" >&2
  exit 1
elif [ "$build $built" = "cuda cpu" ]; then
  echo "note: pip's index has PyTorch's cpu build only, so no GPU is used" >&2
fi
if [ "$build" != here ]; then
  needed 3 "the packages of requirements.txt and requirements-dev.txt" \
    "${pip[@]}" -r requirements.txt -r requirements-dev.txt -c constraints.txt
fi
step 4 "Horovod, built from its source" docker/build-horovod.sh "$venv/bin/python" \
  || echo "note: Horovod's row is left out: $(grep '^error' "$log" || echo "see $log"). Again: make horovod" >&2
step 5 "DeepSpeed's collectives for CPUs, compiled" collectives \
  || echo "note: DeepSpeed's row runs without them, and says so; see $log" >&2
echo "$built" > "$venv/.complete"
