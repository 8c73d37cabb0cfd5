"""What the demo runs on: a small real language model and real text, both from packages every machine can get."""
