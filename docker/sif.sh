#!/usr/bin/env bash
# Turn the images into .sif files for Apptainer, in docker/sif/, beside the sha256 that each must have.
#   make sif [VARIANT=cuda] [IMAGES="torch deepspeed horovod"]
set -euo pipefail
cd "$(dirname "$0")/.."
variant=${VARIANT:-cpu}
mkdir -p docker/sif
for image in ${IMAGES:-torch deepspeed horovod}; do
  sif=docker/sif/$image-$variant.sif
  # zstd's first level: nearly gzip's size, in a fraction of its time.
  apptainer build --force --mksquashfs-args '-comp zstd -Xcompression-level 1' "$sif.part" "docker-daemon:lockstep/$image:$variant"
  mv "$sif.part" "$sif"
done
cd docker/sif
sha256sum -- *.sif > SHA256SUMS
