#!/usr/bin/env bash
# All tests, half an hour; --fast: in minutes, the core, the engines and the KV daemons, without vLLM and
# without tests of whole clusters. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
engine=cpu
if [ "${1:-}" = --fast ]; then
  shift
  engine=none
  set -- -m "not slow and not vllm" tests/unit tests/property tests/services/kvd tests/services/emulated "$@"
fi
scripts/setup.sh --engine "$engine" --dev
export PATH="$PWD/.venv/bin:$PATH" # tests start commands of the environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest "$@"
