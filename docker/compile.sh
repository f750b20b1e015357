#!/usr/bin/env bash
# Inside a build: make the wheel of deepspeed or horovod, from the sources that docker/locks/sources.txt names by hash.
#   compile.sh deepspeed|horovod     leaves it in /opt/wheels
set -euo pipefail
. /opt/tools/settings
if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_INDEX_URL=$INDEX_URL PIP_FIND_LINKS=/wheels
mkdir -p /opt/wheels
case $1 in
  deepspeed)
    # For CPUs its collectives through shared memory are compiled now: the images have no compiler to do it when first used.
    if [ "$VARIANT" = cpu ]; then
      export DS_ACCELERATOR=cpu DS_BUILD_SHM_COMM=1
    else
      . /opt/compile/toolkit.sh
      toolkit /opt/venv/bin/python /tmp/toolkit
    fi
    /opt/tools/bin/pip --python /opt/venv/bin/python wheel --quiet --no-deps --no-build-isolation --require-hashes \
      --wheel-dir /opt/wheels --requirement /opt/tools/locks/sources.txt
    ;;
  horovod)
    /opt/venv/bin/python -m ensurepip > /dev/null # here only: the images have none
    XDG_CACHE_HOME=/tmp/cache /opt/compile/build-horovod.sh /opt/venv/bin/python
    cp /tmp/cache/lockstep/horovod-*/*.whl /opt/wheels
    ;;
esac
