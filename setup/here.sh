#!/usr/bin/env bash
# Take the PyTorch of the environment that is active, as a cluster's or NVIDIA's image has one; it is left as it is.
#   setup/here.sh find PYTHON FOLDERS    write into the file FOLDERS where that environment's packages lie
#   setup/here.sh packages               what is installed beside it, pinned: all but PyTorch and CUDA's libraries
#   setup/here.sh link VENV FOLDERS      have VENV see those packages too, after its own
set -euo pipefail
cd "$(dirname "$0")/.."

case $1 in
  find)
    "$2" - "$3" << 'END'
import importlib.metadata
import pathlib
import sys

try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit(
        f"error: TORCH=here takes the PyTorch of {sys.executable}, which has none. Activate the environment that has one,"
        " name its Python (make setup TORCH=here PYTHON=...), or leave TORCH=here out"
    )
if pathlib.Path(sys.prefix).resolve() == pathlib.Path(".venv").resolve():
    sys.exit("error: the active environment is Lockstep's own .venv. Activate the one whose PyTorch is meant")
if tuple(map(int, version.split(".")[:2])) < (2, 11):
    sys.exit(f"error: Lockstep is proven with PyTorch 2.11 to 2.13, and here is {version}; leave TORCH=here out")
if tuple(map(int, version.split(".")[:2])) > (2, 13):
    print(f"note: Lockstep is proven with PyTorch 2.11 to 2.13, and here is {version}")
print(f"PyTorch {version} of {sys.prefix}")
folders = [folder for folder in sys.path if folder.endswith("-packages") and pathlib.Path(folder).is_dir()]
pathlib.Path(sys.argv[1]).write_text("".join(f"{folder}\n" for folder in folders), encoding="utf-8")
END
    ;;
  packages)
    # What builds Horovod comes with PyTorch otherwise.
    { cat requirements.txt requirements-dev.txt constraints.txt
      sed -n 's/^\(setuptools==[^ ]*\).*/\1/p' docker/locks/torch-cpu.txt
    } | grep -vE '^(#|-|torch==|$)' | sort -u
    ;;
  link)
    "$2/bin/python" - "$3" << 'END'
import pathlib
import shutil
import subprocess
import sys
import sysconfig

shutil.copy(sys.argv[1], pathlib.Path(sysconfig.get_paths()["purelib"]) / "torch_here.pth")
program = "import torch; torch.zeros(1).numpy()"
done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
if done.returncode:
    sys.exit(f"error: this PyTorch can't be used beside Lockstep's packages: {done.stderr.strip().splitlines()[-1]}")
END
    ;;
esac
