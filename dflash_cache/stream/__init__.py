"""Stage two, reading: which documents, in which order, packed into which rows, read ahead of the trainer.

1. ``order`` splits documents into training and held-out ones and permutes the former anew each epoch.
2. ``packing`` cuts and packs them into rows.
3. ``plan`` groups rows into optimizer steps; a place in all of this is two whole numbers.
4. ``loader`` reads a row from the cache into a checked ``batch.PackedBatch``, a few rows ahead.

1 to 3 are pure functions of numbers: no file is opened, nothing depends on threads or ranks.
"""
