#!/usr/bin/env bash
# Try the installed program, from a folder that is not the repository.
# usage: try_wheel.sh FOLDER_OF_THE_PROGRAM GOLDEN_CACHE
set -euo pipefail
bin=$1 cache=$2
"$bin/python" -c "import dflash_cache, sys; assert 'site-packages' in dflash_cache.__file__, dflash_cache.__file__"
"$bin/dflash-cache" --version
"$bin/dflash-cache" --help >/dev/null
for command in extract train demo "inspect cache"; do "$bin/dflash-cache" $command --help >/dev/null; done
"$bin/dflash-cache" inspect cache "$cache" --verify
"$bin/python" -c "import sys, zarr; print(zarr.open_group(sys.argv[1], mode='r')['fc_features'])" "$cache/shard-00000.zarr"
"$bin/dflash-cache" train --shards "$cache" --out ./drafter --max-steps 2 --block-size 4 --num-layers 1 --num-anchors 8
test -s drafter/final/model.safetensors
echo "the installed wheel works"
