#!/bin/bash
# Is there a Python that torch serves, and a compiler? Says what to install, before anything is downloaded.
set -eu
python=$1

fail() {
  echo "$1" >&2
  exit 1
}

command -v "$python" > /dev/null ||
  fail "found no Python under the name '$python', need 3.10 to 3.13. Run: apt install python3 python3-venv, or name one: make PYTHON=/path/to/python3.12"

"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
  fail "found $("$python" --version 2>&1) ('$python'), need Python 3.10 to 3.13. Name another: make PYTHON=/path/to/python3.12"

"$python" -c 'import ensurepip, venv' 2> /dev/null ||
  fail "found $("$python" --version 2>&1) without its venv module. Run: apt install python3-venv (or the python3.X-venv that goes with it)"

compiler=${CXX:-c++}
command -v "${compiler%% *}" > /dev/null ||
  fail "found no C++ compiler under the name '$compiler', need g++ 11 or later. Run: apt install g++, or set CXX=/path/to/g++"

header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -e "$header" ] ||
  echo "note: $header is missing, so torch.compile cannot generate code on the CPU (its tests will fail). Run: apt install python3-dev" >&2
