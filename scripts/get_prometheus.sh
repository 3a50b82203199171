#!/usr/bin/env bash
# Put Debian's prometheus and promtool into .venv/opt/prometheus, for the tests of deploy/observability.
# Nothing is installed: the package is only unpacked, so no service starts and root is not needed.
set -euo pipefail
cd "$(dirname "$0")/.."
target=.venv/opt/prometheus
[ ! -x "$target/usr/bin/promtool" ] || exit 0
if command -v promtool > /dev/null && command -v prometheus > /dev/null; then exit 0; fi

fail() { echo "get_prometheus: $1" >&2; exit 1; }
command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || fail "needs apt-get and dpkg-deb"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
download() { (cd "$work" && apt-get --quiet=2 download prometheus 2> /dev/null > /dev/null); }
# A host that has never read its package lists finds nothing; only root may read them.
download || { [ "$(id -u)" = 0 ] && apt-get --quiet=2 update > /dev/null && download; } \
  || fail "apt-get cannot download the package prometheus"
dpkg-deb -x "$work"/prometheus_*.deb "$work/tree"
mkdir -p "$target/usr"
rm -rf "$target/usr/bin"
mv "$work/tree/usr/bin" "$target/usr/bin"
echo "get_prometheus: $("$target/usr/bin/promtool" --version 2>&1 | head -1) in $target"
