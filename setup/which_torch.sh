#!/bin/sh
# Which of PyTorch's builds set-up takes, and why:  setup/which_torch.sh [cpu|cuda|here]
# Prints `cpu`, `cuda` or `here` (the one of the active environment) and the reason. What is named counts; else CUDA's is taken where there is an NVIDIA GPU, by
# nvidia-smi's word, or by its device file where that program is missing or fails. (The driver's files below /proc are
# seen in containers too that were given no GPU.)
asked=${1:-}

case $asked in
  cpu | cuda | here)
    echo "$asked as TORCH=$asked asks for it"
    exit
    ;;
  '') ;;
  *)
    echo "error: TORCH=$asked: there are cpu, cuda and here" >&2
    exit 2
    ;;
esac

# A driver that is stuck would let nvidia-smi wait for ever.
listed=$(timeout 30 nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
devices=$(ls -d /dev/nvidia[0-9]* 2> /dev/null | wc -l)
# PyTorch's build is for CUDA 13, which needs a driver of NVIDIA's branch 580 and GPUs of compute capability 7.5 (Turing).
# A small old GPU for the screen does not decide for the others beside it.
too_old=$(timeout 30 nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2> /dev/null | awk -F ', *' '
  $1 ~ /^[0-9]/ { driver = $1 }
  $2 ~ /^[0-9]/ && $2 + 0 > best { best = $2 + 0; capability = $2 }
  END {
    if (driver != "" && driver + 0 < 580) print "the driver of NVIDIA is " driver ", and CUDA 13 needs 580 or newer"
    else if (best && best < 7.5) print "the best GPU has compute capability " capability ", and CUDA 13 needs 7.5 or more"
  }')
amd=$(grep -ls '^simd_count [1-9]' /sys/class/kfd/kfd/topology/nodes/*/properties | wc -l)
if [ -n "$too_old" ]; then
  echo "cpu as $too_old (TORCH=cuda takes the other)"
elif [ "$listed" -gt 0 ]; then
  echo "cuda as nvidia-smi lists GPUs (TORCH=cpu takes the other)"
elif [ "$devices" -gt 0 ]; then
  echo "cuda as there is an NVIDIA GPU in /dev (TORCH=cpu takes the other)"
elif [ "$amd" -gt 0 ]; then
  echo "cpu as the GPUs are AMD's, whose build of PyTorch (ROCm) is installed by hand and kept then"
else
  echo "cpu as no NVIDIA GPU is found (TORCH=cuda takes the other)"
fi
