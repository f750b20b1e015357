#!/usr/bin/env bash
# What a container of compose.yaml starts: makes sure that results can be kept, then runs the command in its place.
set -euo pipefail
for folder in results .snakemake; do
  if [ ! -w "$folder" ]; then
    echo "error: $folder/ can't be written by user $(id -u); its owner is $(stat -c %u "$folder"). Run make images, which" \
      "writes .env for the user who runs it, or name your own there: LOCKSTEP_UID=$(stat -c %u "$folder")" >&2
    exit 2
  fi
done
# Under a terminal, Ctrl-C reaches all processes in here. Without one (`docker compose run ... | tee log`), Compose may end
# without handing it on, and all would run on unseen; but our input ends with Compose. (At once, where there is none.)
if [ ! -t 0 ]; then
  # Ten seconds later, as a second signal would cut short what the first one, if it was handed on, has begun.
  { cat > /dev/null; [ "$SECONDS" -lt 2 ] || { sleep 10; kill -INT 0; }; } <&0 &
fi
exec "$@"
