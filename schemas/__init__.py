"""The published JSON Schemas of the manifest, the shard attributes, the configuration and the training state."""
