"""Facts about caches, shards and documents, and their pictures. Computes and returns; never prints."""
