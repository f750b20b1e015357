#!/bin/sh
# Write VENV/bin/lockstep, the name to type: it starts workflow/scripts/command.py of the folder that one is in, and
# elsewhere that of this folder, which then says what is done only in a clone.
#   setup/command.sh VENV
set -eu
bin=$(cd "$1/bin" && pwd)
cat > "$bin/lockstep" << END
#!/bin/sh
folder=.
if [ ! -f workflow/scripts/command.py ]; then folder="$PWD"; fi
exec "$bin/python" "\$folder/workflow/scripts/command.py" "\$@"
END
chmod +x "$bin/lockstep"
