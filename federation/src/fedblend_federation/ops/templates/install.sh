#!/bin/sh
# Sets up @what@ of the federation at @address@ on this machine, as root:
#
#     sh @file@@usage@
#
# This file says whom the machine trusts, and may hold secret keys: copy it over a channel
# you trust, and delete it afterwards.
# Variables:
#     FEDBLEND=...     what pip installs, such as FEDBLEND=fedblend-federation==@version@
#     WHEELS=DIR       a folder with wheels of fedblend and fedblend-federation, which pip
#                      prefers to those of a package index
#     ROOT=DIR         sets up below DIR, for the user who runs this, and starts nothing: the
#                      commands are under ExecStart in the units there
#     ENVIRONMENT=DIR  a Python environment that has fedblend already
set -eu
umask 077
requirement=${FEDBLEND:-fedblend-federation==@version@}
ROOT=${ROOT:-}
here=$ROOT@home@/@folder@
environment=${ENVIRONMENT:-$ROOT/opt/fedblend}
rows= target=

await() {
    # A service needs some seconds.
    for second in $(seq 30); do [ ! -e "$1" ] || return 0; sleep 1; done
}
fail() { echo "error: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
        --rows) [ $# -gt 1 ] || fail "--rows: needs a file"; rows=$2; shift 2 ;;
        --target) [ $# -gt 1 ] || fail "--target: needs a column"; target=$2; shift 2 ;;
        *) fail "$1: is not an option; there are --rows FILE and --target COLUMN" ;;
    esac
done
[ -n "$ROOT" ] || [ "$(id -u)" = 0 ] || fail "run this as root, or with ROOT=DIR for a trial"
[ ! -e "$here" ] || fail "$here: is there already, and is not overwritten"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "python3: is missing, or older than 3.11"
if [ -n "$rows" ]; then
    [ -r "$rows" ] || fail "--rows: $rows: cannot be read"
    kind=$rows
    if [ @several@ = yes ]; then
        [ -d "$rows" ] || fail "--rows: $rows: is no folder with a file for each client"
        kind=$(ls "$rows" | head -n 1)
    fi
    case $kind in
        *.csv | *.parquet | *.npz) ;;
        *) fail "--rows: $rows: is none of .csv, .parquet, .npz" ;;
    esac
fi
@check@
if [ -z "${ENVIRONMENT:-}" ]; then
    echo "installing $requirement into $environment"
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet ${WHEELS:+--find-links "$WHEELS"} "$requirement"
    chmod -R go+rX "$environment"
fi
mkdir -p "$here"
sed '1,/^__FILES__$/d' "$0" | base64 -d | tar -xzf - -C "$here"
# The files name the usual places.
for file in "$here"/*.service "$here"/nginx.conf; do
    [ -e "$file" ] || continue
    sed -e "s|@home@|$ROOT@home@|g" -e "s|@program@|$environment/bin/fedblend|g" \
        -e "s|@bin@:|$environment/bin:|g" ${ROOT:+-e "s| --group @flower_user@||"} \
        "$file" > "$file.new"
    mv "$file.new" "$file"
done
@install@
exit 0
__FILES__
