"""Stage one: the target runs once over the corpus, and six layer outputs a token go into a cache.

1. ``target_name``, ``target``, ``digests``: which model, its config, tokenizer and fingerprint; no weights yet.
2. ``mask_token``: the id that fills unknown block slots.
3. ``disk``: whether the result will fit, before the weights are loaded.
4. ``loading``, ``head``: the weights; embedding, final norm and lm_head, found by probing.
5. ``inputs``: what settings and target imply; ``plan``: documents to shards, to windows, to batches; pure.
6. ``taps``, ``features``: one forward pass to the captured rows; ``transfer`` brings them to the host.
7. ``assembly``, ``pipeline``: rows to shards, shards to disk in a background thread, sealed in order.
8. ``selfcheck``: before the first shard is sealed, what was stored is compared with the target itself.
9. ``runner``: all of it in order; ``progress`` is what it reports, ``run_log`` what it records, ``interrupt`` how a
   signal stops it.
10. ``estimate``: what all of it will make and cost, beforehand.
"""
