#!/usr/bin/env bash
# Install Debian's packages that some tests check against: docker-compose, zsh, fish, strace, systemd's tools.
# Without them those tests are skipped. Needs root; nothing is started.
set -euo pipefail
wanted=()
for pair in docker-compose:docker-compose zsh:zsh fish:fish strace:strace systemd-analyze:systemd; do
  command -v "${pair%%:*}" > /dev/null || wanted+=("${pair##*:}")
done
[ ${#wanted[@]} -gt 0 ] || exit 0

fail() { echo "get_checkers: $1" >&2; exit 1; }
command -v apt-get > /dev/null || fail "needs apt-get for: ${wanted[*]}"
[ "$(id -u)" = 0 ] || fail "needs root for: ${wanted[*]}"
export DEBIAN_FRONTEND=noninteractive
install() { apt-get --quiet=2 install --yes --no-install-recommends "${wanted[@]}" > /dev/null 2>&1; }
install || { apt-get --quiet=2 update > /dev/null 2>&1 && install; } || fail "apt-get cannot install: ${wanted[*]}"
echo "get_checkers: ${wanted[*]} installed"
