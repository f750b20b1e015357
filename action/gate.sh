#!/usr/bin/env bash
# Runs the gate, and tells the later steps its verdict and its folder. The step fails as the gate does.
# Options of Python: neither a job's PYTHONPATH (-E) nor the user's folder (-I) may hide a module of the gate's own.
set -euo pipefail
folder=$(mktemp -d "$RUNNER_TEMP/gate.XXXXXX")/gate
# On a push, what was there before. If that was nothing (zeros, for a new branch), or a forced push has replaced it, so
# that a full clone does not have it, all counts that the default branch lacks.
if [ -z "$AGAINST" ]; then
  AGAINST=${BEFORE:-HEAD~1}
  if [[ $AGAINST =~ ^0+$ ]]; then
    AGAINST=$DEFAULT
    if [[ ${GITHUB_REF_TYPE:-} = branch && ${GITHUB_REF_NAME:-} != "$DEFAULT" ]] &&
      git merge-base --is-ancestor HEAD "origin/$DEFAULT" 2> /dev/null; then
      printf '### Lockstep gate: nothing to compare\n\nThis new branch has no commit that `%s` lacks.\n' "$DEFAULT" >> "$GITHUB_STEP_SUMMARY"
      exit 0
    fi
  elif [ -n "$BEFORE" ] && ! git cat-file -e "$BEFORE^{commit}" 2> /dev/null &&
    [ "$(git rev-parse --is-shallow-repository)" = false ]; then
    AGAINST=$DEFAULT
  fi
fi
options=(--against "$AGAINST" --fail-if-slower "$SLOWER" --blocks "$BLOCKS" --minutes "$MINUTES" --steps "$STEPS")
while read -r path; do
  if [ -n "$path" ]; then options+=(--share "$path"); fi
done <<< "$SHARE"
case "${STRICT,,}" in
  true | yes | on | 1) options+=(--strict) ;;
  false | no | off | 0 | '') ;;
  *)
    printf '### Lockstep gate: no verdict\n\n`strict` is `%s`. Set it to true or false.\n' "$STRICT" >> "$GITHUB_STEP_SUMMARY"
    exit 2
    ;;
esac
# The command is written as in a shell, over several lines if it is long.
set +u
if ! eval "words=(
$COMMAND
)"; then
  printf '### Lockstep gate: no verdict\n\nThe command is not one that a shell can read: one command, without `;`, `|` or `&`.\n' >> "$GITHUB_STEP_SUMMARY"
  exit 2
fi
set -u
status=0
"$RUNNER_TEMP/lockstep/bin/python" -E "$HERE/workflow/scripts/gate.py" "${options[@]}" --output "$folder" -- "${words[@]}" || status=$?
if [ -f "$folder/gate.json" ]; then
  verdict=$("$RUNNER_TEMP/lockstep/bin/python" -I -c 'import json, sys; print(json.load(open(sys.argv[1]))["verdict"])' "$folder/gate.json")
  printf 'verdict=%s\nfolder=%s\n' "$verdict" "$folder" >> "$GITHUB_OUTPUT"
else
  if [ "$status" = 1 ]; then status=4; fi # it broke off without a verdict, which is no verdict on the change
  printf '### Lockstep gate: no verdict\n\nIt ended with exit code %s; the log of this step says why.\n' "$status" >> "$GITHUB_STEP_SUMMARY"
fi
exit "$status"
