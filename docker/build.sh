#!/usr/bin/env bash
# Build the images, and write their digests to docker/digests.yaml.
#   make images                      every image, for this machine's CPUs
#   make images VARIANT=cuda         the same for NVIDIA GPUs
#   make images IMAGES="torch bench" only some
# Where the network is not open, from the environment: http_proxy and its like; BASE, DEBIAN, DEBIAN_SECURITY, INDEX_URL
# and CPU_INDEX_URL name mirrors; CA is a file of certificate authorities (a secret of the build, in no image);
# NETWORK=host lets the build use the host's network. Wheels in docker/wheels/ are taken before any index is asked (with
# PyTorch's CPU build among them, CPU_INDEX_URL may be empty). Locks hold all of them to their hashes.
set -euo pipefail
cd "$(dirname "$0")/.."
variant=${VARIANT:-cpu}
commit=$(git rev-parse HEAD 2> /dev/null || echo unknown)
targets="$(sed -n 's/^families: \[\(.*\)\]$/\1/p' docker/images.yaml | tr -d ,) bench"
images=${IMAGES:-$targets}
if [[ ! $variant =~ ^(cpu|cuda)$ ]]; then
  echo "error: VARIANT=$variant: there are cpu and cuda" >&2
  exit 2
fi
for image in $images; do
  if [[ " $targets " != *" $image "* ]]; then
    echo "error: IMAGES=\"$images\": there is no image $image; there are $targets" >&2
    exit 2
  fi
done
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
description=$(sed -n 's/^description = "\(.*\)"/\1/p' pyproject.toml)

arguments=(--build-arg "VARIANT=$variant" --network "${NETWORK:-default}"
  --label org.opencontainers.image.title=Lockstep --label "org.opencontainers.image.description=$description" --label org.opencontainers.image.licenses=MIT
  --label "org.opencontainers.image.version=$version" --label "org.opencontainers.image.revision=$commit")
for name in BASE DEBIAN DEBIAN_SECURITY INDEX_URL CPU_INDEX_URL; do
  if [ -n "${!name+given}" ]; then arguments+=(--build-arg "$name=${!name}"); fi
done
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do # known to Docker, and kept in no image
  if [ -n "${!name:-}" ]; then arguments+=(--build-arg "$name"); fi
done
if [ -n "${CA:-}" ]; then arguments+=(--secret "id=ca,src=$CA"); fi

for image in $images; do
  DOCKER_BUILDKIT=1 docker build --file docker/Dockerfile --target "$image" --tag "lockstep/$image:$variant" "${arguments[@]}" .
done

mkdir -p results .snakemake
docker image ls --no-trunc --format '{{.Repository}}:{{.Tag}}: {{.ID}}' 'lockstep/*' | sort > docker/digests.yaml
# Compose reads .env by itself: the user that `docker compose run` works as, and the image by its digest, as another clone
# may give its name to another one. What else stands there stays.
touch .env
{
  grep -v '^LOCKSTEP_' .env || [ $? = 1 ]
  echo "LOCKSTEP_UID=${SUDO_UID:-$(id -u)}"
  echo "LOCKSTEP_GID=${SUDO_GID:-$(id -g)}"
  for kind in cpu cuda; do # of what is not built, a name that says how to
    built=$(sed -n "s|^lockstep/bench:$kind: ||p" docker/digests.yaml)
    echo "LOCKSTEP_BENCH_${kind^^}=${built:-lockstep/bench-is-not-built:make-images-VARIANT-$kind}"
  done
} > .env.new
mv .env.new .env
docker image ls 'lockstep/*'
