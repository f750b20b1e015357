#!/usr/bin/env bash
# An environment with the few packages that the gate needs, in the versions of requirements.txt. PyTorch is the user's.
set -euo pipefail
"$PYTHON" -m venv "$RUNNER_TEMP/lockstep"
grep -E '^(numpy|scipy|psutil|PyYAML|Jinja2|jsonschema|rich)==' "$HERE/requirements.txt" |
  xargs "$RUNNER_TEMP/lockstep/bin/python" -m pip install --quiet --disable-pip-version-check
