#!/bin/sh
# Write VENV/bin/lockstep, the name to type: it starts workflow/scripts/command.py of the folder that one is in; `prove`,
# which is about scripts that lie elsewhere, starts that of this folder from anywhere.
#   setup/command.sh VENV
set -eu
bin=$(cd "$1/bin" && pwd)
cat > "$bin/lockstep" << END
#!/bin/sh
folder=.
if [ ! -f workflow/scripts/command.py ]; then
  if [ "\$1" != prove ]; then
    echo "error: this is not Lockstep's folder; its commands are called there" >&2
    exit 2
  fi
  folder="$PWD"
fi
exec "$bin/python" "\$folder/workflow/scripts/command.py" "\$@"
END
chmod +x "$bin/lockstep"
