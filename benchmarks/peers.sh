#!/usr/bin/env bash
# Makes .venv-peers, the environment of benchmarks/peer_homeobox.py, from a Python >= 3.12.
# Where it cannot be made it says why and ends with 0: the benchmarks then measure us alone.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-peers
pins=requirements/peers-3.13.txt

skip() { # reason
    echo "peers skipped: $1"
    rm -rf "$venv"
    exit 0
}

candidates() { # every interpreter worth trying, 3.13 first: the pins were resolved with it
    local minor
    for minor in 13 14 12; do
        [ -n "${PEERS_PYTHON:-}" ] && [ "$minor" = 13 ] && echo "$PEERS_PYTHON"
        command -v "python3.$minor"
        ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python 2>/dev/null
        command -v uv >/dev/null && uv python find --no-python-downloads "3.$minor" 2>/dev/null
    done
    command -v python3
}

# A pyenv shim exists for versions that are not switched on, so each candidate is run.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -x "$venv/bin/python" ] && cmp -s "$pins" "$venv/pins.txt"; then
    echo "$venv is up to date"
    exit 0
fi
python=""
while read -r candidate; do
    if usable "$candidate"; then
        python=$candidate
        break
    fi
done < <(candidates)
[ -n "$python" ] || skip "no Python >= 3.12 with venv found; set PEERS_PYTHON to one"
rm -rf "$venv"
"$python" -m venv "$venv" || skip "$python cannot make a virtual environment"
"$venv/bin/python" -m pip install --quiet --requirement "$pins" || skip "the pinned packages could not be installed"
"$venv/bin/python" -m compileall -q "$venv/lib" >/dev/null 2>&1
"$venv/bin/python" -W ignore -c 'import homeobox' || skip "homeobox does not import"
cp "$pins" "$venv/pins.txt"
echo "$venv is ready ($("$venv/bin/python" --version))"
