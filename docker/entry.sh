#!/usr/bin/env bash
# What a container of compose.yaml starts: makes sure that results can be kept and that the container can be ended, then
# runs the command in its place.
set -euo pipefail
refuse() {
  echo "error: $*" >&2
  exit 2
}
for folder in results .snakemake; do
  [ -w "$folder" ] || refuse "$folder/ can't be written by user $(id -u); its owner is $(stat -c %u "$folder"). Run make" \
    "images, which writes .env for the user who runs it, or name your own there: LOCKSTEP_UID=$(stat -c %u "$folder")"
done
# What somebody else left in there, as root does outside of containers.
foreign=$(find results .snakemake ! -user "$(id -u)" ! -writable -print -quit)
[ -z "$foreign" ] || refuse "$foreign can't be written by user $(id -u); its owner is $(stat -c %u "$foreign"). Give it back:" \
  "sudo chown -R $(id -u):$(id -g) results .snakemake"
for word; do
  case $word in
    /*.y*ml | ../*.y*ml) [ -e "$word" ] || refuse "$word is not there: a container sees only the project's folder." \
      "Put it there, and name it from there." ;;
  esac
done
# Under a terminal, Ctrl-C reaches all processes in here. Without one Compose ends without handing a signal on, and all
# would run on unseen; but our input, a pipe then, ends with Compose. (Detached, it is no pipe.)
if [ -p /dev/stdin ]; then
  ! timeout 2 cat > /dev/null || refuse "the standard input is empty, as in cron or CI, so that no signal to Compose could" \
    "end this container, and it would train on unseen. Give it one that stays open: docker compose run ... < <(sleep" \
    "infinity); or start it detached: docker compose run -d ..., which docker compose down --remove-orphans ends"
  # Ten seconds later, as a second signal would cut short what the first one, if it was handed on, has begun.
  { cat > /dev/null; sleep 10; kill -INT 0; } <&0 &
fi
exec "$@"
