"""The drafter: its configuration, anchors, attention, layers, loss and metrics. Tensors in, tensors out; no files.

Import from the modules: ``config`` needs no torch, the others do.
"""
