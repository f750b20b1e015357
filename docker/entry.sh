#!/usr/bin/env bash
# What a container of compose.yaml starts: makes sure that results can be kept, then runs the command in its place.
set -euo pipefail
if ! mkdir -p /results/.snakemake 2> /dev/null; then
  echo "error: results/ can't be written by user $(id -u); its owner is $(stat -c %u /results). Run make images, which" \
    "writes .env for the user who runs it, or name your own there: LOCKSTEP_UID=$(stat -c %u /results)" >&2
  exit 2
fi
exec "$@"
