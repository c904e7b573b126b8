#!/usr/bin/env bash
# Make the environment and install the package into it, once.
#
#   tools/setup_env.sh [EXTRAS]      EXTRAS as in pyproject.toml, such as dev
#
# Settings, from the environment:
#   PYTHON            the Python to make the environment with (default: python3)
#   VENV              where the environment is (default: .venv)
#   DCL_MIN_FREE_GB   free disk space to ask for before PyTorch is installed (default: 9; the install
#                     peaks at 8.5: 2.6 of downloads beside 5.9 unpacked)
#
# A stamp in the environment remembers what was installed from which pyproject.toml, so a second call does nothing.
# pip uses the package index that it is configured with.
set -eu

cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=${1:-}
python=${PYTHON:-python3}
venv=${VENV:-.venv}
min_free_gb=${DCL_MIN_FREE_GB:-9}

say() { printf '==> %s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    printf '       %s\n' "$@" >&2
    exit 1
}

# What an installation depends on: the place of the sources and the content of pyproject.toml.
fingerprint() { { pwd && cat pyproject.toml; } | cksum; }
stamp() { printf '%s/.torch-dcl-%s' "$venv" "${1:-base}"; }
installed() { [ -f "$(stamp "$1")" ] && [ "$(cat "$(stamp "$1")")" = "$(fingerprint)" ]; }

check_python() { # PYTHON REMEDY
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && return
    fail "Python 3.11 or newer is needed, and $1 is $("$1" --version 2>&1)." "$2"
}

make_venv() {
    command -v "$python" >/dev/null ||
        fail "there is no $python." "Install Python 3.11 or newer, or name yours: make PYTHON=/path/to/python3 ..."
    check_python "$python" "Name another one: make PYTHON=/path/to/python3.11 ..."
    say "making the environment $venv with $("$python" --version 2>&1)"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null || ! "$python" -m venv "$venv"; then
        fail "$python cannot make an environment: its venv or ensurepip module is missing or does not work." \
            "On Debian and Ubuntu: apt install python3-venv" \
            "Elsewhere, or without root, name another Python that has both: make PYTHON=/path/to/python3 ..."
    fi
}

# The nearest folder of a path that exists already.
existing_folder() {
    local folder=$1
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    printf '%s' "$folder"
}

check_disk() { # GB
    local folder free_kb free_gb
    folder=$(cd "$(existing_folder "$venv")" && pwd)
    free_kb=$(df -Pk "$folder" | awk 'NR == 2 { for (i = 2; i <= NF; i++) if ($i ~ /%$/) { print $(i - 1); exit } }')
    [ -n "$free_kb" ] || return 0 # a df that says nothing readable is no reason to stop
    free_gb=$((free_kb * 1024 / 1000000000))
    [ "$free_gb" -ge "$1" ] ||
        fail "too little room on the disk of $folder: about $1 GB are needed, $free_gb GB are free." \
            "Free some space, or put the environment on another disk: make VENV=/another/disk/venv ..."
    # Where it is tight, pip does not keep the downloads as well.
    [ "$free_gb" -ge $(($1 + 3)) ] || export PIP_NO_CACHE_DIR=1
}

has() { "$venv/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

# ----------------------------------------------------------------------------------------------------------------------

if [ -n "$extras" ] && installed "$extras"; then exit 0; fi
if [ -z "$extras" ] && { installed "" || installed dev; }; then exit 0; fi

if [ -e "$venv/pyvenv.cfg" ]; then
    "$venv/bin/python" -c '' 2>/dev/null ||
        fail "the environment $venv is there, but its Python does not run." "Remove the folder and try again."
    check_python "$venv/bin/python" \
        "Remove the folder $venv and try again with a newer one: make PYTHON=/path/to/python3.11 ..."
elif [ -d "$venv" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv is a folder with something else in it." "Name another place: make VENV=/path/to/venv ..."
fi

if [ -x "$venv/bin/python" ] && has torch; then
    say "installing what is missing into $venv, a minute or two"
else
    check_disk "$min_free_gb"
    if ! [ -x "$venv/bin/python" ] || ! has pip; then make_venv; fi
    say "installing PyTorch and friends into $venv, about 5.5 GB, a few minutes"
fi

# pip unpacks beside the environment, on the disk that was checked, not in a small /tmp.
scratch=$venv/.pip-tmp
mkdir -p "$scratch"
trap 'rm -rf "$scratch"' EXIT
scratch=$(cd "$scratch" && pwd)
TMPDIR=$scratch PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install -e ".${extras:+[$extras]}" ||
    fail "pip could not install the package; what it said is above." \
        "Check the connection to the package index and run the same command again."

fingerprint >"$(stamp "$extras")"
say "the environment $venv is ready"
