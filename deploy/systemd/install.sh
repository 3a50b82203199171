#!/usr/bin/env bash
# Installs the units, the user and the settings of Splitwise on a host with systemd; can be repeated and undone.
#
#   install.sh [--tls] [--prefix DIR] [--root DIR]     install or bring up to date
#   install.sh --uninstall [--purge] [--root DIR]      stop, and take away what was installed
#
# --prefix  where this repository lies on the host (default /opt/splitwise)
# --tls     add a drop-in to each service that reads certificates from /etc/splitwise/tls
# --purge   with --uninstall: also settings that were edited, certificates, caches, logs, and the user
# --root    work on the tree below DIR and start nothing: for images and tests
#
# Settings in /etc/splitwise that exist are kept. What was installed is noted in /var/lib/splitwise/installed.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
prefix=/opt/splitwise root="" tls="" uninstall="" purge=""
fail() { echo "install: $1" >&2; exit "${2:-2}"; }
while [ $# -gt 0 ]; do
  case "$1" in
    --prefix) prefix="${2:?--prefix needs a folder}"; shift 2 ;;
    --root) root="${2:?--root needs a folder}"; shift 2 ;;
    --tls) tls=yes; shift ;;
    --uninstall) uninstall=yes; shift ;;
    --purge) purge=yes; shift ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown option $1 (see --help)" ;;
  esac
done
[ -z "$purge" ] || [ -n "$uninstall" ] || fail "--purge goes with --uninstall"
[[ "$prefix" =~ ^/[A-Za-z0-9._/-]+$ ]] || fail "--prefix $prefix: an absolute path of letters, digits and ._-"
root="${root%/}"
[ -z "$root" ] || [ -d "$root" ] || fail "--root $root: no such folder"
[ -n "$root" ] || [ "$(id -u)" = 0 ] || fail "must be run as root: sudo $0" 1

units="$root/etc/systemd/system"
settings="$root/etc/splitwise"
state="$root/var/lib/splitwise"
manifest="$state/installed"
live=""
[ -n "$root" ] || [ ! -d /run/systemd/system ] || live=yes

checksum() { sha256sum < "$1" | cut -c1-64; }
noted() { [ -f "$manifest" ] && grep -qxF "$(checksum "$1") ${1#"$root"}" "$manifest"; }

put() { # CONTENT-FILE TARGET MODE: write it and note it, unless it is there
  if [ -f "$2" ] && cmp -s "$1" "$2"; then
    echo "unchanged  ${2#"$root"}"
  else
    mkdir -p "$(dirname "$2")"
    install -m "$3" "$1" "$2.new"
    mv "$2.new" "$2"
    echo "installed  ${2#"$root"}"
  fi
  echo "$(checksum "$2") ${2#"$root"}" >> "$new_manifest"
}

put_settings() { # like put, but what an operator has edited stays
  if [ -f "$2" ] && ! noted "$2" && ! cmp -s "$1" "$2"; then
    echo "kept       ${2#"$root"} (edited; the new default is ${1#"$work/"} in $here)"
    return
  fi
  put "$1" "$2" "$3"
}

install_all() {
  [ -n "$root" ] || [ -x "$prefix/.venv/bin/python" ] \
    || fail "$prefix/.venv is missing: put the repository at $prefix and run scripts/setup.sh there, or give --prefix" 1
  work="$(mktemp -d)"
  trap 'rm -rf "$work"' EXIT
  new_manifest="$work/manifest"
  mkdir -p "$state"
  local file name
  while read -r file; do
    name="${file#"$here/"}"
    mkdir -p "$(dirname "$work/$name")"
    sed "s|/opt/splitwise|$prefix|g" "$file" > "$work/$name"
    put "$work/$name" "$units/$name" 644
  done < <(find "$here" -name '*.service' -o -name '*.target' -o -path '*.service.d/*.conf' | sort)
  if [ -n "$tls" ]; then
    for file in "$here"/tls/*.conf; do
      name="$(basename "$file" .conf)"
      case "$name" in machine) names="prompt@ token@" ;; kvd) names="kvd@" ;; *) names="$name" ;; esac
      for name in $names; do put "$file" "$units/splitwise-$name.service.d/tls.conf" 644; done
    done
  fi
  put "$here/splitwise.sysusers" "$root/etc/sysusers.d/splitwise.conf" 644
  put "$here/splitwise.tmpfiles" "$root/etc/tmpfiles.d/splitwise.conf" 644
  # Only our own two files, and nothing of theirs is ever removed.
  systemd-sysusers ${root:+--root="$root"} splitwise.conf
  systemd-tmpfiles --create ${root:+--root="$root"} splitwise.conf
  for name in splitwise.yaml environment; do
    cp "$here/$name" "$work/$name"
    put_settings "$work/$name" "$settings/$name" 640
    [ "$(id -u)" != 0 ] || chgrp "$(awk -F: '$1 == "splitwise" {print $3}' "$root/etc/group")" "$settings/$name"
  done
  drop_leftovers
  mv "$new_manifest" "$manifest"
  [ -z "$live" ] || systemctl daemon-reload
  cat << END
Next:
  edit /etc/splitwise/splitwise.yaml; check it: $prefix/.venv/bin/splitwise config check /etc/splitwise/splitwise.yaml
  systemctl enable --now splitwise.target splitwise-kvd@node splitwise-prompt@0    # as the host's role asks
  after an update: systemctl restart splitwise-NAME, one machine at a time (docs/operations.md)
END
}

drop_leftovers() { # what an earlier version installed and this one does not
  [ -f "$manifest" ] || return 0
  local sum path
  while read -r sum path; do
    grep -qF " $path" "$new_manifest" && continue
    case "$path" in "${settings#"$root"}"/*) continue ;; esac
    [ -f "$root$path" ] && [ "$(checksum "$root$path")" = "$sum" ] && rm "$root$path" && echo "removed    $path"
  done < "$manifest"
  return 0
}

uninstall_all() {
  if [ ! -f "$manifest" ]; then
    echo "nothing is installed${root:+ below $root}"
    [ -n "$purge" ] || return 0
  fi
  [ -z "$live" ] || systemctl stop splitwise.target 'splitwise-*' # waits for the drain
  # Enabled units are links; those of instances are not in the manifest.
  [ ! -d "$units" ] || find "$units" -type l \( -name 'splitwise-*' -o -name splitwise.target \) -delete
  local sum path
  if [ -f "$manifest" ]; then
    while read -r sum path; do
      [ -f "$root$path" ] || continue
      if [ "$(checksum "$root$path")" = "$sum" ] || [ -n "$purge" ]; then
        rm "$root$path" && echo "removed    $path"
      fi
    done < "$manifest"
    rm -f "$manifest"
  fi
  if [ -n "$purge" ]; then
    rm -rf "$settings" "$state" "$root/var/cache/splitwise" "$root/run/splitwise" "$root/run/splitwise-power"
    if grep -qs '^splitwise:' "$root/etc/passwd"; then userdel ${root:+--prefix "$root"} splitwise; fi
    if grep -qs '^splitwise:' "$root/etc/group"; then groupdel ${root:+--prefix "$root"} splitwise; fi
  fi
  # Folders that are empty now were ours alone.
  [ ! -d "$units" ] || find "$units" -mindepth 1 -type d -name 'splitwise*' -empty -delete
  for path in "$settings/tls" "$settings" "$state" "$root/run/splitwise"; do rmdir "$path" 2> /dev/null || true; done
  [ ! -d "$settings" ] || echo "kept       ${settings#"$root"} (edited files; --purge takes them, too)"
  [ -z "$live" ] || systemctl daemon-reload
}

if [ -n "$uninstall" ]; then uninstall_all; else install_all; fi
