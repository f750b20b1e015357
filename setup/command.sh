#!/bin/sh
# Write VENV/bin/lockstep, the name to type: it starts workflow/scripts/command.py of the folder that one is in.
#   setup/command.sh VENV
set -eu
bin=$(cd "$1/bin" && pwd)
cat > "$bin/lockstep" << END
#!/bin/sh
if [ ! -f workflow/scripts/command.py ]; then
  echo "error: this is not Lockstep's folder; its commands are called there" >&2
  exit 2
fi
exec "$bin/python" workflow/scripts/command.py "\$@"
END
chmod +x "$bin/lockstep"
