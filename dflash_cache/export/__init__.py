"""Drafters as others read them: z-lab's checkpoint format, and the model card beside it.

``zlab_config`` maps the configuration and needs no torch; ``zlab`` writes and reads checkpoint folders; ``card`` writes
the README; ``folder`` makes folders appear whole or not at all.
"""
