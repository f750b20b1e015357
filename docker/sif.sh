#!/usr/bin/env bash
# Turn the images into .sif files for Apptainer, in docker/sif/, beside the sha256 that each must have.
#   make sif [VARIANT=cuda] [IMAGES="torch horovod"]
set -euo pipefail
cd "$(dirname "$0")/.."
variant=${VARIANT:-cpu}
mkdir -p docker/sif
families=$(sed -n 's/^families: \[\(.*\)\]$/\1/p' docker/images.yaml | tr -d ,)
for image in ${IMAGES:-$families}; do
  sif=docker/sif/$image-$variant.sif
  if ! docker image inspect "lockstep/$image:$variant" > /dev/null; then
    echo "error: there is no image lockstep/$image:$variant. Build it: make images VARIANT=$variant" >&2
    exit 2
  fi
  # zstd's first level: nearly gzip's size, in a fraction of its time.
  apptainer build --force --mksquashfs-args '-comp zstd -Xcompression-level 1' "$sif.part" "docker-daemon:lockstep/$image:$variant"
  mv "$sif.part" "$sif"
done
cd docker/sif
sha256sum -- *.sif > SHA256SUMS
