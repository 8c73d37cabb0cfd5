"""The on-disk format: the only code that knows zarr. Normative text: docs/format.md. Never imports torch."""
