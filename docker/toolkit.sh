# To be sourced. From the Python package index CUDA's compiler, headers and libraries come as wheels; this lays them out
# as the toolkit that builds look for, in a folder of its own, so that the environment stays as it is.

toolkit() { # PYTHON FOLDER: make the toolkit there, from the wheels that PYTHON imports; sets what builds go by
  local part library
  mkdir -p "$2"
  while read -r part; do
    if [ -d "$part/cu13" ]; then cp -rsf "$part/cu13/." "$2"; fi
    if [ -d "$part/nccl" ]; then NCCL_HOME=$2/nccl; cp -rsf "$part/nccl" "$2"; fi
  done < <("$1" -c 'import nvidia; print(*nvidia.__path__, sep="\n")')
  ln -sfn lib "$2/lib64" # where nvcc looks
  # What a linker asks for, which wheels leave out.
  for library in "$2"/lib/libcudart.so.* "$NCCL_HOME"/lib/libnccl.so.*; do ln -sf "${library##*/}" "${library%.so.*}.so"; done
  export CUDA_HOME=$2 NCCL_HOME PATH=$2/bin:$PATH
}
