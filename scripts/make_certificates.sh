#!/usr/bin/env bash
# Certificates for the tls section: a CA, and one certificate for each role or process.
#
#   scripts/make_certificates.sh FOLDER                        all six roles
#   scripts/make_certificates.sh FOLDER machine=gpu-1 kvd=gpu-1-kvd   one for each process, as ROLE=NAME
#   scripts/make_certificates.sh FOLDER router+machine+kvd+operator=host   several roles, for one host
#
# Writes ca.pem and ca.key once, and NAME.pem with NAME.key for each certificate that is not
# there yet; to renew one, delete its two files. DAYS sets how long a new one holds (default
# 397). A process needs ca.pem and its own pair: ca.key can make any certificate, so keep it
# off the cluster's hosts.
set -euo pipefail
umask 077

roles="router machine kvd power client operator"
fail() { echo "make_certificates: $1" >&2; exit "${2:-2}"; }

[ $# -ge 1 ] && [ -n "$1" ] && [ "${1#-}" = "$1" ] || fail "usage: $0 FOLDER [ROLE | ROLE=NAME]..."
command -v openssl > /dev/null || fail "needs the openssl command; install the package openssl" 1
days="${DAYS:-397}"
[[ "$days" =~ ^[1-9][0-9]{0,4}$ ]] || fail "DAYS=$days: write a number of days from 1"
folder="$1"
shift
[ $# -gt 0 ] || set -- $roles

for word in "$@"; do # all are checked before anything is written
  role="${word%%=*}" name="${word#*=}"
  [[ "$role" != *+* || "$word" == *=* ]] || fail "$word: several roles need a name, as in $word=host"
  while read -r part; do
    [[ " $roles " == *" $part "* ]] || fail "$word: no role '$part'; known: $roles"
  done <<< "${role//+/$'\n'}"
  [[ "$name" =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$ ]] || fail "$word: a name has letters, digits, . _ and -, at most 64"
  [ "$name" != ca ] || fail "$word: ca is the name of the CA's own files"
done

mkdir -p "$folder"
work="$(mktemp -d "$folder/.making.XXXXXX")" # a run that is cut leaves no half of a pair
trap 'rm -rf "$work"' EXIT

quietly() { "$@" 2> "$work/errors" || fail "openssl failed: $(cat "$work/errors")" 1; }
new_key() { quietly openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

keep() { # the key first: a certificate never lies there without it
  mv "$work/$1.key" "$folder/$1.key"
  chmod 644 "$work/$1.pem"
  mv "$work/$1.pem" "$folder/$1.pem"
}

if [ ! -e "$folder/ca.pem" ]; then
  cat > "$work/ca.cnf" << END
[req]
prompt = no
distinguished_name = name
x509_extensions = extensions
[name]
CN = Splitwise CA
[extensions]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
END
  new_key "$work/ca.key"
  quietly openssl req -x509 -new -sha256 -days 3650 -config "$work/ca.cnf" -key "$work/ca.key" -out "$work/ca.pem"
  keep ca
  echo "$folder/ca.pem"
fi
[ -r "$folder/ca.key" ] || fail "$folder/ca.key: needed to sign; bring it, or use another folder" 1

for word in "$@"; do
  role="${word%%=*}" name="${word#*=}"
  if [ -e "$folder/$name.pem" ]; then
    echo "$folder/$name.pem: kept"
    continue
  fi
  case "$role" in # who is only ever a caller cannot pose as a server
    client | operator) usage="clientAuth" ;;
    *) usage="serverAuth, clientAuth" ;;
  esac
  cat > "$work/$name.cnf" << END
[req]
prompt = no
distinguished_name = name
[name]
CN = $name
[extensions]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = $usage
subjectAltName = DNS:${role//+/.splitwise, DNS:}.splitwise
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
END
  new_key "$work/$name.key"
  quietly openssl req -new -sha256 -config "$work/$name.cnf" -key "$work/$name.key" -out "$work/$name.csr"
  quietly openssl x509 -req -sha256 -days "$days" -in "$work/$name.csr" \
    -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -set_serial "0x$(openssl rand -hex 16)" \
    -extfile "$work/$name.cnf" -extensions extensions -out "$work/$name.pem"
  keep "$name"
  echo "$folder/$name.pem"
done
