"""Write every schema beside this module."""

from pathlib import Path

from dflash_cache.schemas import SCHEMAS, generate

for name in SCHEMAS:
    Path(__file__).with_name(f"{name}.schema.json").write_text(generate(name), encoding="utf-8")
