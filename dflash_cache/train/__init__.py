"""Stage two, training: a cache in, a drafter out.

``loop.train`` is the entry. ``setup`` opens and checks everything before the first step, ``step`` takes one optimizer
step, ``evaluation`` measures held-out documents, ``state`` and ``checkpoint`` keep a run so that it resumes exactly,
``contract`` says which settings a resumed run must share, ``run_folder`` owns what a run leaves on disk, and ``events``
is all that a caller sees while it runs.
"""
