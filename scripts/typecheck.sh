#!/usr/bin/env bash
# mypy --strict over the package as it is installed. The folders cli/ and schemas/ lie outside dflash_cache/ and are
# part of it only once installed, which mypy cannot follow: give it a tree of links that looks like the installed one.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/dflash_cache"
ln -s "$root"/dflash_cache/* "$root/cli" "$root/schemas" "$tree/dflash_cache/"
cd "$tree"
mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p dflash_cache
