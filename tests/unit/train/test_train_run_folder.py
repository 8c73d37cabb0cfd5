"""A run's folder holds that run and nothing of anyone else's."""

import json

import pytest

from dflash_cache.errors import CheckpointError, DiskSpaceError, OutputExistsError
from dflash_cache.train.metrics_log import truncate_metrics
from dflash_cache.train.run_folder import RunFolder
from dflash_cache.train.state import Progress


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def fill(folder):
    """Make a folder look like a run's, with something of the user's beside it."""
    for name in ("checkpoints/step-000010", "tensorboard", "final"):
        (folder.path / name).mkdir(parents=True)
    for name in ("run.json", "metrics.jsonl", "notes.txt"):
        (folder.path / name).write_text("{}")


def test_new_and_empty_folders_are_free(folder):
    folder.refuse_others(resume=False, overwrite=False)
    folder.path.mkdir()
    folder.refuse_others(resume=False, overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_something_else_is_never_touched(folder, overwrite):
    folder.path.mkdir()
    (folder.path / "thesis.tex").write_text("x")
    with pytest.raises(OutputExistsError, match=r"holds no run \(found thesis.tex\)"):
        folder.refuse_others(resume=False, overwrite=overwrite)
    assert (folder.path / "thesis.tex").exists()


def test_a_file_is_not_a_folder(folder):
    folder.path.write_text("x")
    with pytest.raises(OutputExistsError, match="is a file"):
        folder.refuse_others(resume=False, overwrite=True)


def test_a_run_is_continued_or_deleted_only_when_asked(folder):
    fill(folder)
    with pytest.raises(OutputExistsError, match=r"holds a run .latest checkpoint step-000010.*--resume.*--overwrite"):
        folder.refuse_others(resume=False, overwrite=False)
    folder.refuse_others(resume=True, overwrite=False)
    folder.refuse_others(resume=False, overwrite=True)


def test_nothing_to_resume(folder):
    with pytest.raises(CheckpointError, match="there is no run to resume"):
        folder.refuse_others(resume=True, overwrite=False)


def test_overwriting_deletes_what_is_a_runs_and_nothing_else(folder):
    fill(folder)
    with folder.claim(overwrite=True):
        pass
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "notes.txt"]


def test_two_processes_cannot_train_in_one_folder(folder):
    with (
        folder.claim(overwrite=False),
        pytest.raises(OutputExistsError, match="another process is training"),
        folder.claim(overwrite=True),
    ):
        pass
    with folder.claim(overwrite=False):
        pass


def test_too_little_disk_is_noticed_before_training(folder):
    folder.require_space(1000, overwrite=False)
    with pytest.raises(DiskSpaceError, match="bytes free; checkpoints and the final drafter need"):
        folder.require_space(10**18, overwrite=False)


def test_what_overwriting_will_free_counts_as_free(folder):
    fill(folder)
    with (folder.checkpoints / "step-000010" / "drafter.safetensors").open("wb") as file:
        file.truncate(10**13)  # sparse: takes no room
    folder.require_space(10**13, overwrite=True)
    with pytest.raises(DiskSpaceError):
        folder.require_space(10**13, overwrite=False)


def test_a_broken_record_is_refused(folder):
    fill(folder)
    with pytest.raises(CheckpointError, match="cannot be read as the record of a run"):
        folder.read_record()


def write_lines(path, *records, tail=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def step(number):
    return {"kind": "step", "step": number}


def evaluation(number):
    return {"kind": "evaluation", "step": number}


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, step(1), step(2), evaluation(2), step(3), step(4), evaluation(4), tail='{"kind": "st')
    truncate_metrics(path, Progress(step=3, evaluated_step=2))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [step(1), step(2), evaluation(2), step(3)]


def test_an_evaluation_that_the_checkpoint_does_not_know_is_cut_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, step(1), step(2), evaluation(2))
    truncate_metrics(path, Progress(step=2, evaluated_step=0))
    assert len(path.read_text().splitlines()) == 2


def test_foreign_lines_are_not_thrown_away(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, step(1), {"loss": 1.0}, step(2))
    with pytest.raises(CheckpointError, match=r"metrics.jsonl, line 2: not a record"):
        truncate_metrics(path, Progress(step=2))
    assert len(path.read_text().splitlines()) == 3


def test_what_a_run_left_before_it_had_a_record_is_no_obstacle(folder):
    folder.path.mkdir()
    for name in (".lock", ".run.json.tmp"):
        (folder.path / name).touch()
    folder.refuse_others(resume=False, overwrite=False)


def test_a_killed_deletion_can_be_repeated(folder, monkeypatch):
    fill(folder)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_cache.train.run_folder.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt), folder.claim(overwrite=True):
        pass
    monkeypatch.undo()
    folder.refuse_others(resume=False, overwrite=True)
    with folder.claim(overwrite=True):
        assert {path.name for path in folder.path.iterdir()} == {".lock", "notes.txt"}


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"[" * 100_000 + b"\n"], ids=["no text", "nested"])
def test_a_damaged_log_is_named(tmp_path, line):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(line)
    with pytest.raises(CheckpointError, match="line 1: not a record"):
        truncate_metrics(log, Progress(step=1))
