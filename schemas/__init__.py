"""The published JSON Schemas, generated from the models that read the files.

Regenerate them with ``python -m dflash_cache.schemas``. The files lie beside this module, so that other languages and
editors can use them without running it; a test keeps both equal.
"""

import json
from importlib.resources import files
from typing import Any

from pydantic import BaseModel

from dflash_cache.config import ExtractConfig, TrainConfig
from dflash_cache.format.manifest import CacheManifest

__all__ = ["SCHEMAS", "generate", "published"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

SCHEMAS: dict[str, type[BaseModel]] = {
    "manifest": CacheManifest,
    "extract-config": ExtractConfig,
    "train-config": TrainConfig,
}


def generate(name: str) -> str:
    """Generate a schema's text from the code."""
    document: dict[str, Any] = {"$schema": _DIALECT, **SCHEMAS[name].model_json_schema()}
    if name == "manifest":
        # Stated beside the model: the digest is of the model's own contents.
        document["properties"]["manifest_digest"] = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
        document["required"] = [*document["required"], "manifest_digest", "format", "format_version"]
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def published(name: str) -> str:
    """Read a schema's text as it is published."""
    return files("dflash_cache.schemas").joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
