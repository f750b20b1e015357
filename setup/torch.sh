#!/usr/bin/env bash
# Install one of PyTorch's builds, CUDA's libraries with it:  setup/torch.sh PYTHON cpu|cuda [ASKED]
# All comes from where pip gets packages on this machine. Only PyTorch's CPU build, where these sources lack it, is asked
# of PyTorch's own index of such builds as well (CPU_INDEX_URL names another; empty: none). The images' locks say which
# versions, and hold them to their hashes. ASKED is what TORCH= named: that is installed, or nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 build=$2 asked=${3:-}
cpu_index=${CPU_INDEX_URL-https://download.pytorch.org/whl/cpu}
version=$(sed -n 's/^torch==//p' requirements.txt)

offered() { # SECONDS [ARGUMENTS...]: the versions of torch that pip finds within that time, one a line
  { timeout "$1" "$python" -m pip index versions torch --disable-pip-version-check "${@:2}" || true; } \
    | tee -a /dev/stderr | sed -n 's/^Available versions: //p' | sed 's/, /\n/g'
}
locked() { # cpu|cuda: of that lock torch, and what the other lock has not: CUDA's libraries
  local other=cuda
  if [ "$1" = cuda ]; then other=cpu; fi
  awk '/^[^ ]/ { split($1, parts, "=="); name = parts[1]; wanted = name == "torch" || !(name in others) }
       FNR == NR { others[name]; next }
       wanted' "docker/locks/torch-$other.txt" "docker/locks/torch-$1.txt"
}
without() { # REASON: there is no CPU build; one that was asked for is not replaced by another
  if [ -n "$asked" ]; then
    echo "error: PyTorch's CPU build can't be had: $1" >&2
    exit 1
  fi
  echo "note: PyTorch's CPU build can't be had, so what pip's index gives is taken: $1"
}

had=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2> /dev/null || true)
if [ "$build $had" = "cpu $version+cpu" ]; then exit; fi # it is all there is to it, and no index need answer
if [[ -z "$asked" && "$had" == "$version+rocm"* ]]; then
  echo "note: PyTorch $had, the build for AMD's GPUs, is kept"
  exit
fi
here=$(offered 600)
more=()
if [ "$build" = cpu ] && ! grep -qxF "$version+cpu" <<< "$here"; then
  # An index out of reach is given up soon, also where a firewall swallows what is sent there.
  if [ -z "$cpu_index" ]; then
    without "pip's index does not have it, and CPU_INDEX_URL is empty"
    build=cuda
  elif offered 30 --extra-index-url "$cpu_index" --timeout 10 --retries 0 | grep -qxF "$version+cpu"; then
    more=(--extra-index-url "$cpu_index")
  else
    without "pip's index does not have it, and $cpu_index does not answer or does not have it"
    build=cuda
  fi
fi

# `===`, as a build of the index's own (2.13.0+cpu, say) would do for `==2.13.0`, and be preferred to the plain one.
wanted=$version
if [ "$build" = cpu ]; then wanted=$version+cpu; fi
list=$(mktemp)
trap 'rm -f "$list"' EXIT
hashes=()
platform=$("$python" -c 'import platform; print("{}.{}".format(*platform.python_version_tuple()), platform.machine())')
if [ "$build" = cuda ] && ! grep -qxF "$version" <<< "$here"; then
  echo "note: pip's index has no plain torch $version, and no lock names another, so its hash is not checked"
  echo "torch==$version" > "$list"
  wanted=
elif [[ "$build $platform" =~ ^(cpu\ 3\.11|cuda\ 3\..*)\ x86_64$ ]]; then
  locked "$build" | sed 's/^torch==/torch===/' > "$list"
  hashes=(--require-hashes)
else
  echo "note: the locks do not name PyTorch's $build build for Python $platform, so its hash is not checked"
  echo "torch===$wanted" > "$list"
fi

# With another build goes what was made for it.
if [ -n "$had" ] && [ "$had" != "$wanted" ]; then
  locked cuda | sed -n 's/==.*//p' | xargs "$python" -m pip uninstall --disable-pip-version-check --yes horovod
fi
"$python" -m pip install --disable-pip-version-check --progress-bar off --no-deps "${hashes[@]}" "${more[@]}" --requirement "$list"
