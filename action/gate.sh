#!/usr/bin/env bash
# Runs the gate, and tells the later steps its verdict and its folder. The step fails as the gate does.
# Options of Python: neither a job's PYTHONPATH (-E) nor the user's folder (-I) may hide a module of the gate's own.
set -euo pipefail
folder=$(mktemp -d "$RUNNER_TEMP/gate.XXXXXX")/gate
if [[ $AGAINST =~ ^0+$ ]]; then AGAINST=HEAD~1; fi # on a push of a new branch nothing was there before
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
