"""The course of training as numbers: resuming jumps, it does not skip."""

import itertools

import numpy as np

from dflash_cache.stream.plan import StreamPosition, TrainingPlan

LENGTHS = np.array([30, 12, 45, 7, 22, 18, 33, 9, 51, 14], dtype=np.int64)


def make_plan(documents=range(10), seed=0, row_tokens=64, rows_per_step=2):
    return TrainingPlan(
        np.array(documents, dtype=np.int64), LENGTHS, seed=seed, row_tokens=row_tokens, rows_per_step=rows_per_step
    )


START = StreamPosition(0, 0)


def first_steps(plan, count, position=START):
    return list(itertools.islice(plan.steps(position), count))


def test_an_epoch_has_every_document_once_and_steps_do_not_span_epochs():
    plan = make_plan()
    steps = first_steps(plan, plan.num_steps(epochs=3, max_steps=None))
    for epoch in range(3):
        pieces = [piece for step in steps if step.start.epoch == epoch for row in step.rows for piece in row]
        assert sorted((piece.document, piece.start, piece.stop) for piece in pieces) == [
            (document, 0, length) for document, length in enumerate(LENGTHS.tolist())
        ]
    assert {step.start.epoch for step in steps} == {0, 1, 2}
    assert steps[-1].next == StreamPosition(3, 0)


def test_steps_from_any_position_are_those_of_the_whole_run():
    steps = first_steps(make_plan(), 12)
    for number, step in enumerate(steps):
        assert first_steps(make_plan(), 12 - number, step.start) == steps[number:]
    assert all(earlier.next == later.start for earlier, later in itertools.pairwise(steps))


def test_epochs_and_seeds_differ():
    orders = {
        tuple(piece.document for step in first_steps(make_plan(seed=seed), 6) for row in step.rows for piece in row)
        for seed in range(3)
    }
    assert len(orders) == 3
    plan = make_plan(rows_per_step=100)
    first, second = first_steps(plan, 2)
    assert first.rows != second.rows


def test_rows_per_step_does_not_change_the_rows():
    rows = [[row for step in first_steps(make_plan(rows_per_step=n), 20) for row in step.rows][:8] for n in (1, 2, 3)]
    assert rows[0] == rows[1] == rows[2]


def test_counting_steps_matches_taking_them():
    plan = make_plan()
    steps = first_steps(plan, 40)
    for epochs in (1, 2, 3):
        assert plan.num_steps(epochs=epochs, max_steps=None) == sum(step.start.epoch < epochs for step in steps)
    assert plan.num_steps(epochs=3, max_steps=2) == 2
    assert plan.num_steps(epochs=1, max_steps=10_000) == plan.num_steps(epochs=1, max_steps=None)
