#!/bin/sh
# Make a virtual environment with pip in it, also where Debian's python3-venv (ensurepip) is not installed.
set -eu
venv=$1

if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

python=
for candidate in python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "hotfuse: no Python 3.11, 3.12 or 3.13 was found; install python3.11 and python3-venv" >&2
    exit 1
fi

echo "setting up $venv with $("$python" --version) (once; torch is a large download)"
if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$venv"
elif "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --without-pip "$venv"
    "$python" -m pip --python "$venv/bin/python" install --quiet pip
else
    echo "hotfuse: $python has neither ensurepip nor pip; install python3-venv" >&2
    exit 1
fi
