"""What a typed model name means."""

from pathlib import Path

import pytest

from dflash_cache.errors import TargetError
from dflash_cache.extract.target_name import resolve_target_name


def _make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_bare_qwen_name_gets_its_organisation_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = resolve_target_name("Qwen3.6-27B")
    assert (name.location, name.folder, name.identity_name) == ("Qwen/Qwen3.6-27B", None, "Qwen/Qwen3.6-27B")
    assert name.notice is not None and "Qwen/Qwen3.6-27B" in name.notice


def test_an_existing_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _make_model(tmp_path / "Qwen3.6-27B")
    name = resolve_target_name("Qwen3.6-27B")
    assert name.folder == Path("Qwen3.6-27B") and name.notice is None


def test_a_whole_hub_name_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_target_name("org/some-model").location == "org/some-model"


def test_a_moved_folder_keeps_its_identity(tmp_path: Path) -> None:
    first, second = _make_model(tmp_path / "a" / "model"), _make_model(tmp_path / "b" / "model")
    assert resolve_target_name(str(first)).identity_name == resolve_target_name(f"{second}/").identity_name == "model"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("smollm", "organisation/smollm"),
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("a/b/c", "no such folder"),
        ("models/", "no such folder"),
        ("two words", "no such folder"),
    ],
)
def test_what_is_neither_is_refused_with_a_next_step(
    given: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=hint):
        resolve_target_name(given)


def test_a_folder_without_a_model_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"config\.json"):
        resolve_target_name(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(TargetError, match="is a file"):
        resolve_target_name(str(tmp_path / "model.safetensors"))
