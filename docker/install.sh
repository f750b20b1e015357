#!/usr/bin/env bash
# Inside a build: install locks into the environment, by pip of the build's own tools. Needs no pip in the image.
#   install.sh LOCK...   docker/locks/LOCK-VARIANT.txt, or LOCK.txt; then what was compiled under that name
# The list of all packages (an SBOM, CycloneDX) is left beside them, as /opt/venv/sbom.json.
set -euo pipefail
tools=/opt/tools
. "$tools/settings"
environment=${TARGET:-/opt/venv/bin/python}

# Behind a proxy that signs by itself, its certificate authority is given as the secret `ca`.
if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_INDEX_URL=$INDEX_URL
# Only here: a CPU build would also satisfy what the lock for GPUs asks for.
if [ "$VARIANT" = cpu ] && [ -n "$CPU_INDEX_URL" ]; then export PIP_EXTRA_INDEX_URL=$CPU_INDEX_URL; fi

for name; do
  lock=$tools/locks/$name-$VARIANT.txt
  [ -f "$lock" ] || lock=$tools/locks/$name.txt
  "$tools/bin/pip" --python "$environment" install --quiet --require-hashes --no-deps --find-links /wheels --requirement "$lock"
  if ls /built/"$name"*.whl > /dev/null 2>&1; then
    "$tools/bin/pip" --python "$environment" install --quiet --no-index --no-deps /built/"$name"*.whl
  fi
done

if [ -z "${TARGET:-}" ]; then
  "$tools/bin/cyclonedx-py" environment --output-reproducible --of JSON -o /opt/venv/sbom.json "$environment"
fi
