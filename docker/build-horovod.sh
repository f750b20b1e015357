#!/usr/bin/env bash
# Build Horovod 0.28.1 (its last release, 2023) for the PyTorch that is installed, and install it.
#   docker/build-horovod.sh [PYTHON]        as `make horovod` and the images call it
# The wheel is kept in ${XDG_CACHE_HOME:-~/.cache}/lockstep, so each pair of Python and PyTorch builds it once.
# With PyTorch's build for CUDA it is built with NCCL, or its GPUs would share all through the CPU; CUDA's compiler comes
# from the Python package index then, for the time of the build. MPI is built in where mpicxx is found, gloo always.
set -euo pipefail
python=$(readlink -f "$(dirname "$(command -v "${1:-python3}")")")/$(basename "${1:-python3}")
here=$(cd "$(dirname "$0")" && pwd)
version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

kind=$("$python" -c 'import sys, torch; print(f"py{sys.version_info.major}{sys.version_info.minor}-torch{torch.__version__}")')
cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")')
with=gloo
if command -v mpicxx > /dev/null; then with=$with-mpi; fi
if [ -n "$cuda" ]; then with=$with-nccl; fi # a wheel without it is another one, and no use here
cache=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep/horovod-$version-$kind-$with

if ! ls "$cache"/*.whl > /dev/null 2>&1; then
  command -v g++ > /dev/null || { echo "error: building Horovod needs g++; on Debian: apt install g++" >&2; exit 2; }
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  [ -f "$headers/Python.h" ] || { echo "error: building Horovod needs Python's headers; on Debian: apt install python3-dev" >&2; exit 2; }
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  # Its CMake files are too old for CMake 4.
  "$python" -m venv "$work/tools"
  "$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check cmake==3.31.10
  echo "horovod==$version --hash=sha256:$sha256" > "$work/requirements.txt"
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation \
    --require-hashes --requirement "$work/requirements.txt" --dest "$work"
  tar -xf "$work/horovod-$version.tar.gz" -C "$work"
  # PyTorch's headers have needed C++17 since 2.1 and C++20 since 2.12; Horovod asks for C++14.
  sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' "$work/horovod-$version"/{,horovod/torch/}CMakeLists.txt
  # It takes for granted that other headers bring this one in, which the C++ library of gcc 13 and later no longer has.
  sed -i '0,/^#include/s//#include <string>\n&/' "$work/horovod-$version/horovod/common/group_table.h"
  if [ -z "$cuda" ]; then
    # A part of CUDA's toolkit would make a build for CPUs fail, and is of no use to it.
    sed -i 's/CUDA_HOME is not None/False/' "$work/horovod-$version/cmake/Modules/FindPytorch.cmake"
  else
    compiler= # where CUDA's compiler is fetched to; the images have it beside PyTorch
    if ! "$python" -c 'from importlib.metadata import version; version("nvidia-cuda-nvcc")' 2> /dev/null; then
      compiler=$work/compiler
      lock=$here/locks/compiler-cuda.txt
      has=$(sed -n 's/^nvidia-cuda-nvcc==\([0-9]*\.[0-9]*\).*/\1/p' "$lock")
      [ "$has" = "$cuda" ] || { echo "error: building Horovod with NCCL needs CUDA's compiler $cuda, and $lock has $has" >&2; exit 2; }
      "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$compiler" --requirement "$lock"
    fi
    # What it links with is loaded by PyTorch, and no library may be looked for where the toolkit was.
    sed -i 's/^project(horovod CXX)/&\nset(CMAKE_SKIP_RPATH ON)/' "$work/horovod-$version/CMakeLists.txt"
    . "$here/toolkit.sh"
    PYTHONPATH=$compiler toolkit "$python" "$work/cuda"
    # The driver's library has this name on every machine; without a number it has it only where it is developed for.
    sed -i 's/"libcuda\.so"/"libcuda.so.1"/' "$work/horovod-$version/horovod/torch/cuda_util.cc"
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME=$CUDA_HOME HOROVOD_NCCL_HOME=$NCCL_HOME HOROVOD_NCCL_LINK=SHARED
  fi
  # Without what a debugger reads, its library has 2 MB in place of 68.
  sed -i 's/RelWithDebInfo/Release/' "$work/horovod-$version/setup.py"
  PATH="$work/tools/bin:$PATH" LDFLAGS=-Wl,--strip-all \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 MAKEFLAGS="-j$(nproc)" \
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir "$work/wheel" "$work/horovod-$version"
  mkdir -p "$cache"
  mv "$work"/wheel/*.whl "$cache"
fi
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$cache"/*.whl
# Its own dependencies, which --no-deps left out; torch is there.
"$python" -m pip install --quiet --disable-pip-version-check cloudpickle==3.1.2 psutil pyyaml packaging
"$python" -c 'import horovod.torch as hvd; print(f"horovod: gloo {bool(hvd.gloo_built())}, MPI {bool(hvd.mpi_built())}, NCCL {bool(hvd.nccl_built())}")'
