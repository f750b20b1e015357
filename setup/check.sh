#!/bin/sh
# What set-up needs of this machine, asked before anything is installed:  setup/check.sh PYTHON VENV [cpu|cuda|here]
# Says in one line what is missing and how to install it: with `error:` and exit code 2 what nothing goes without, with
# `note:` what only costs a row.
python=$1 venv=$2
decided=$("$(dirname "$0")/which_torch.sh" "${3:-}") || exit

fail() {
  echo "error: $*" >&2
  exit 2
}
asked() { "$python" -c "$1" 2> /dev/null; }

command -v "$python" > /dev/null || fail "there is no program $python. On Debian: apt install python3; or name another: make setup PYTHON=python3.11"
version=$(asked 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
  3.11 | 3.12 | 3.13) ;;
  *) fail "$python is Python ${version:-of an unknown version}, and Lockstep is tried with 3.11, 3.12 and 3.13. Install one of them, and name it: make setup PYTHON=python3.11" ;;
esac

# What only costs something first: `missing` are Debian's packages, `costs` what is not there without them.
missing='' costs=''
lacks() { missing="$missing $1"; costs="$costs${costs:+; }$2"; }
command -v git > /dev/null || lacks git "without git no record names its commit, and tests fail"
without="the row horovod is left out, and deepspeed runs without collectives of its own"
command -v g++ > /dev/null || lacks g++ "without g++ $without"
asked 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' \
  || lacks python3-dev "without Python's headers (Python.h) $without"

asked 'import ensurepip, venv' || fail "$python has no venv. On Debian: apt install python3-venv$missing"

mkdir -p "$venv" || exit 2
free=$(df -Pm "$venv" | awk 'NR == 2 { print $4 }')
case $decided in
  here*) needed=2500 ;;
  cpu*) needed=4000 ;;
  *) needed=10000 ;; # CUDA's libraries
esac
[ "$free" -ge "$needed" ] || fail "$venv has $free MB of disk left, and set-up needs $needed for PyTorch's ${decided%% *} build, ${decided#* }. Make room, or name another place: make setup VENV=/large/venv"
[ -z "$missing" ] || echo "note: $costs. On Debian: apt install$missing" >&2
