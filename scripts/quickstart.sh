#!/usr/bin/env bash
# The one command: set everything up, serve the default model split over two machines, answer one prompt.
# Arguments go to `splitwise demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
engine=cpu
case " $* " in *" emulated "* | *"=emulated "*) engine=none ;; esac
scripts/setup.sh --engine "$engine"
exec .venv/bin/splitwise demo "$@"
