#!/usr/bin/env bash
# Set up a virtual environment in .venv and run the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || python3.11 -m venv .venv
.venv/bin/pip install -q -c constraints.txt -e '.[test]'
# Two processes, one thread each: more threads than cores make the small models of the tests slower, not faster.
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
