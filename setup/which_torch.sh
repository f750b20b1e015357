#!/bin/sh
# Which of PyTorch's builds set-up takes, and why:  setup/which_torch.sh [cpu|cuda]
# Prints `cpu` or `cuda` and the reason. What is named counts; else CUDA's is taken where there is an NVIDIA GPU, by
# nvidia-smi's word, or by its device file where that program is missing or fails. (The driver's files below /proc are
# seen in containers too that were given no GPU.)
asked=${1:-}

case $asked in
  cpu | cuda)
    echo "$asked as TORCH=$asked asks for it"
    exit
    ;;
  '') ;;
  *)
    echo "error: TORCH=$asked: there are cpu and cuda" >&2
    exit 2
    ;;
esac

# A driver that is stuck would let nvidia-smi wait for ever.
listed=$(timeout 30 nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
devices=$(ls -d /dev/nvidia[0-9]* 2> /dev/null | wc -l)
if [ "$listed" -gt 0 ]; then
  echo "cuda as nvidia-smi lists GPUs (TORCH=cpu takes the other)"
elif [ "$devices" -gt 0 ]; then
  echo "cuda as there is an NVIDIA GPU in /dev (TORCH=cpu takes the other)"
else
  echo "cpu as no NVIDIA GPU is found (TORCH=cuda takes the other)"
fi
