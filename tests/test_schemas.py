"""The published schemas are those of the code, and what the code writes conforms to them."""

import json
from pathlib import Path

import jsonschema
import pytest
from support.random_caches import make_cache

from dflash_cache.schemas import SCHEMAS, generate, published


@pytest.mark.parametrize("name", SCHEMAS)
def test_published_schema_equals_the_generated_one(name: str) -> None:
    assert published(name) == generate(name), "run `python -m dflash_cache.schemas` and commit what it changed"


def test_a_written_manifest_conforms(tmp_path: Path) -> None:
    document = json.loads((make_cache(tmp_path / "cache") / "manifest.json").read_text())
    schema = json.loads(published("manifest"))
    jsonschema.validate(document, schema)
    del document["identity"]["features"]["last_layer"]["final_norm_applied"]
    with pytest.raises(jsonschema.ValidationError, match="final_norm_applied"):
        jsonschema.validate(document, schema)
