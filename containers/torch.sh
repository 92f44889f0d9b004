#!/usr/bin/env bash
# torch.sh: sourced by venv.sh and steps/wheels.sh; chooses the build of torch that a stack gets.

# Fills the array `torch` with the arguments of uv that install torch, and `torch_build` with its name: cpu is
# PyTorch's own CPU build (0.2 GB), pypi the package index's CUDA build (2 to 3 GB to fetch), auto the first that is
# to be had. Reads the array `uv`. Where cpu is asked for and not to be had, it says why and returns 3.
# shellcheck disable=SC2034,SC2154  # `uv` is the caller's, `torch` is for the caller
choose_torch() { # FOLDER auto|cpu|pypi PYTHON
  local folder=$1 asked=$2 python=$3 problem=
  torch_build=$asked
  if [[ $asked == auto || $asked == cpu ]]; then
    torch_build=pypi
    if problem=$(is_cpu_build_to_be_had "$folder" "$asked" "$python" 2>&1); then torch_build=cpu; fi
  fi
  if [[ $asked == cpu && $torch_build != cpu ]]; then
    printf '%s\n' "$problem" >&2
    echo "torch: PyTorch's index of CPU builds cannot be used from here. Reach it, or set TORCH_BUILD=pypi:" \
      "the package index's CUDA build, which makes an image about 6 GB larger." >&2
    return 3
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
      echo "torch: TORCH_BUILD=$asked: no such build. Use cpu or pypi." >&2
      return 2
      ;;
  esac
}

is_cpu_build_to_be_had() { # FOLDER auto|cpu PYTHON; auto asks once and soon gives up
  local quick=()
  if [[ $2 == auto ]]; then quick=(UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=10); fi
  env "${quick[@]}" "${uv[@]}" install --quiet --dry-run --no-deps --reinstall --python "$3" \
    --torch-backend cpu -r "$1/torch-cpu.txt"
}
