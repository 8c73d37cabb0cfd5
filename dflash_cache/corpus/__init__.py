"""Text in, tokens and loss masks out; nothing later in the pipeline sees text.

1. ``reader``: files to lines to :class:`~dflash_cache.corpus.records.RawDocument` (``records`` knows the fields).
2. ``chat``: a chat to the text that the target's template makes of it, and the spans that the assistant generates.
3. ``tokenize``: one tokenisation per document, loss mask, truncation, what is dropped and why (``summary``).
4. ``store``: tokens and masks on disk, opened by memory map, with a digest of all of it.
5. ``batches``: documents of like length together, under a token budget.

Import from the modules: ``batches`` and ``store`` need neither transformers nor tokenizers.
"""
