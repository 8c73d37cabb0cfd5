#!/usr/bin/env bash
# Set up a virtual environment in .venv and run the whole job on a real language model and real text.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || python3.11 -m venv .venv
.venv/bin/pip install -q -c constraints.txt -e '.[demo]'
.venv/bin/dflash-cache demo "$@"
