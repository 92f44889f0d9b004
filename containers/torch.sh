#!/usr/bin/env bash
# torch.sh: sourced by venv.sh and steps/wheels.sh; chooses the build of torch 2.8.0 that the CPU-Intel stack gets.

# Fills the array `torch` with the arguments of uv that install torch, and `torch_build` with its name: cpu is
# PyTorch's own CPU build (0.2 GB), pypi the package index's CUDA build (3 GB to fetch), auto the first that is
# to be had. Reads the array `uv`.
# shellcheck disable=SC2034,SC2154  # `uv` is the caller's, `torch` is for the caller
choose_torch() { # FOLDER auto|cpu|pypi PYTHON
  local folder=$1 asked=$2 python=$3
  torch_build=$asked
  if [[ $asked == auto ]]; then
    torch_build=pypi
    if UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=10 "${uv[@]}" install --quiet --dry-run --no-deps --reinstall --python "$python" \
      --torch-backend cpu -r "$folder/torch-cpu.txt" 2>/dev/null; then torch_build=cpu; fi
  fi
  case $torch_build in
    # torchvision's wheel on that index carries no hash, so hashes are checked where they are given.
    cpu)
      torch=(--torch-backend cpu "$folder/torch-cpu.txt")
      echo "torch: PyTorch's own CPU build"
      ;;
    pypi)
      torch=(--require-hashes "$folder/torch-pypi.txt")
      echo "torch: the package index's CUDA build"
      ;;
    *)
      echo "torch: no such build: $asked; it is auto, cpu or pypi" >&2
      return 2
      ;;
  esac
}
