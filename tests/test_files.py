"""Files that must last: the old content or the whole new one, never something between."""

import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torch_dcl import files, save_model

posix_only = pytest.mark.skipif(os.name != "posix", reason="permission bits and signals as POSIX has them")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# Writing


@settings(max_examples=30)
@given(first=st.binary(max_size=5000), second=st.binary(max_size=5000))
def test_what_is_written_is_read_back_and_replaces_what_was_there(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("bytes")
    path = folder / "content.bin"
    for data in (first, second):
        files.write_bytes(path, data)
        assert path.read_bytes() == data
        assert files.sha256_file(path) == files.sha256_bytes(data)
    assert names(folder) == ["content.bin"]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_come_in_any_of_their_kinds(tmp_path, kind):
    files.write_bytes(tmp_path / "a", kind(b"abc"))
    assert (tmp_path / "a").read_bytes() == b"abc"


def test_text_is_utf8_with_the_line_ends_it_came_with(tmp_path):
    files.write_text(tmp_path / "a.txt", "Σ 10 ×\r\nsecond\n")
    assert (tmp_path / "a.txt").read_bytes() == "Σ 10 ×\r\nsecond\n".encode()


def test_a_path_may_be_a_string_and_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write_text("a.txt", "here")
    assert (tmp_path / "a.txt").read_text() == "here"


def test_the_longest_file_name_fits(tmp_path):
    name = "n" * 251 + ".txt"
    files.write_text(tmp_path / name, "here")
    assert names(tmp_path) == [name]


@posix_only
def test_a_link_stays_a_link_and_the_file_behind_it_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "a.txt"
    real.write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to(real)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


# Permissions


@posix_only
@pytest.mark.parametrize("bits", [0o600, 0o640, 0o444, 0o755])
def test_a_replaced_file_keeps_its_permission_bits(tmp_path, bits):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(bits)
    files.write_text(path, "new")
    assert path.read_text() == "new"
    assert mode(path) == bits


@posix_only
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permission_bits_of_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "a", "new")
        files.write_text(tmp_path / "usual", "new")
        files.write_sealed(tmp_path / "b.safetensors", "kind", {"x": torch.ones(3)}, {})  # 600 by safetensors itself
        save_model(nn.Linear(2, 2), tmp_path / "c.safetensors")
    finally:
        os.umask(before)
    assert {mode(path) for path in tmp_path.iterdir()} == {0o666 & ~umask}


# Interruptions


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"old")
    return path


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(old, error):
    def write_half():
        with files.replacing(old) as fresh:
            fresh.write_bytes(b"half of the n")
            raise error("half way")

    with pytest.raises(error, match="half way"):
        write_half()
    assert old.read_bytes() == b"old"
    assert names(old.parent) == ["model.bin"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_file_and_nothing_else(old, monkeypatch, step):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        files.write_bytes(old, b"new")
    monkeypatch.undo()
    assert old.read_bytes() == b"old"
    assert names(old.parent) == ["model.bin"]


@posix_only
def test_a_killed_process_leaves_the_old_file(old):
    # files.py is run by its path: the child then starts without torch.
    program = (
        "import os, runpy, signal, sys\n"
        "replacing = runpy.run_path(sys.argv[1])['replacing']\n"
        "with replacing(sys.argv[2]) as fresh:\n"
        "    fresh.write_bytes(b'half of the n')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, files.__file__, str(old)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert old.read_bytes() == b"old"
    assert [path.name for path in old.parent.glob("*.bin")] == ["model.bin"]
    files.write_bytes(old, b"new")
    assert old.read_bytes() == b"new"


def test_content_and_rename_are_synced_in_this_order(old, monkeypatch):
    log = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (log.append(stat.S_IFMT(os.fstat(fd).st_mode)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (log.append("replace"), replace(*paths)))
    files.write_bytes(old, b"new")
    folder = [stat.S_IFDIR] if os.name == "posix" else []
    assert log == [stat.S_IFREG, "replace", *folder]


def test_a_reader_sees_one_whole_version_while_two_writers_work(tmp_path):
    path = tmp_path / "shared.bin"
    versions = {letter * 200_000 for letter in (b"a", b"b")}
    files.write_bytes(path, min(versions))

    def write(data):
        for _ in range(20):
            files.write_bytes(path, data)

    writers = [threading.Thread(target=write, args=(data,)) for data in versions]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in versions
    assert path.read_bytes() in versions
    assert names(tmp_path) == ["shared.bin"]


# Libraries that write by name


def test_the_path_given_has_the_same_name_and_is_free(tmp_path):
    with files.replacing(tmp_path / "model.safetensors") as fresh:
        assert fresh.name == "model.safetensors"
        assert not fresh.exists()
        assert not (tmp_path / "model.safetensors").exists()
        fresh.write_bytes(b"new")
    assert (tmp_path / "model.safetensors").read_bytes() == b"new"


def test_safetensors_writes_through_it(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path / "weights.safetensors"
    with files.replacing(path) as fresh:
        save_file({"w": torch.arange(6.0)}, fresh)
    assert torch.equal(load_file(path)["w"], torch.arange(6.0))


def test_a_block_that_writes_nothing_is_an_error_and_the_old_file_stays(old):
    with pytest.raises(FileNotFoundError, match=r"model\.bin: no file was written"), files.replacing(old):
        pass
    assert old.read_bytes() == b"old"


# Bad input


def test_a_missing_folder_is_named_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        files.write_text(tmp_path / "missing" / "a.txt", "x")
    assert f"the folder {tmp_path / 'missing'} does not exist" in str(caught.value)
    assert "create it" in str(caught.value)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder in which nobody can write")
def test_a_folder_that_cannot_be_written_to_is_named_with_the_file():
    with pytest.raises(OSError, match=r"cannot write /proc/net.bin: .*, in the folder /proc; choose another path"):
        files.write_bytes("/proc/net.bin", b"")


def test_a_disk_that_is_full_is_named_with_the_file_and_the_file_stays(old):
    def fill():
        with files.replacing(old) as fresh:
            fresh.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = old.read_bytes()
    with pytest.raises(OSError, match=r"cannot write .*model\.bin: No space left .*; free space, or") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert old.read_bytes() == before


def test_a_file_where_a_folder_should_be_is_named(old):
    with pytest.raises(NotADirectoryError, match=r"model\.bin is a file"):
        files.write_text(old / "a.txt", "x")


def test_a_folder_is_not_replaced(tmp_path):
    with pytest.raises(IsADirectoryError, match="name a file inside it"):
        files.write_text(tmp_path, "x")


# Hashes


def test_hashes_are_those_everyone_knows(tmp_path):
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "abc").write_bytes(b"abc")
    assert files.sha256_file(tmp_path / "abc") == known
    assert files.sha256_bytes(b"abc") == known


@given(st.lists(st.binary(max_size=50)))
def test_parts_are_hashed_as_if_joined(parts):
    assert files.sha256_bytes(*parts) == hashlib.sha256(b"".join(parts)).hexdigest()


def test_a_large_file_is_hashed_whole(tmp_path):
    data = bytes(range(256)) * 20_000
    (tmp_path / "large").write_bytes(data)
    assert files.sha256_file(tmp_path / "large") == hashlib.sha256(data).hexdigest()


# Sealed files: the test of a bit in every byte of a dataset is in tests/data/test_prepared.py


def sealed(path, about=None, key="kind"):
    import torch

    tensors = {"w": torch.arange(6.0).view(2, 3), "label": torch.tensor([1, 2, 3]), "empty": torch.zeros(0, 4)}
    return files.write_sealed(path, key, tensors, {"name": "ü"} if about is None else about), tensors


plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50)
@given(about=st.dictionaries(st.text(), plain_data, max_size=4))
def test_a_sealed_file_gives_tensors_and_description_back(tmp_path_factory, about):
    import torch

    path = tmp_path_factory.mktemp("sealed") / "a.safetensors"
    seal, tensors = sealed(path, about)
    again, said = files.read_sealed(path, "kind")
    assert said == about
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)
    assert names(path.parent) == ["a.safetensors"]
    # The seal is the hash of the whole file with its own digits set to zero.
    content = path.read_bytes()
    assert content.count(seal.encode()) == 1
    assert files.sha256_bytes(content.replace(seal.encode(), b"0" * 64)) == seal


def test_the_same_content_is_sealed_to_the_same_file(tmp_path):
    first, second = sealed(tmp_path / "a", {"x": 1, "y": 2})[0], sealed(tmp_path / "b", {"y": 2, "x": 1})[0]
    assert first == second
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sealed(tmp_path / "b", {"x": 1, "y": 3})[0] != first


def test_views_are_sealed_with_their_own_values_alone(tmp_path):
    import torch

    whole = torch.arange(24.0).view(4, 6)
    views = {"turned": whole.T, "rows": whole[1:3], "every": whole[:, ::2], "one": whole[0, 0]}
    for name, view in views.items():
        files.write_sealed(tmp_path / name, "kind", {name: view}, {})
        assert torch.equal(files.read_sealed(tmp_path / name, "kind")[0][name], view)
        assert (tmp_path / name).stat().st_size < 400


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    path = tmp_path_factory.mktemp("intact") / "a.safetensors"
    sealed(path)
    return path.read_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_a_changed_byte_anywhere_is_found(tmp_path_factory, intact, data):
    content = bytearray(intact)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(content)
    with pytest.raises(files.SealedError, match=r"changed\.safetensors is damaged"):
        files.read_sealed(path, "kind")


@settings(max_examples=50)
@given(data=st.data())
def test_a_sealed_file_that_was_cut_or_lengthened_is_found(tmp_path_factory, intact, data):
    cut = data.draw(st.integers(0, len(intact) - 1))
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    for wrong in (intact[:cut], intact + intact[: cut + 1]):
        path.write_bytes(wrong)
        with pytest.raises(files.SealedError, match=r"cut\.safetensors is damaged"):
            files.read_sealed(path, "kind")


def test_a_sealed_file_of_another_kind_is_refused(tmp_path):
    sealed(tmp_path / "a", key="dataset")
    with pytest.raises(files.SealedError, match=r"a is no file of the kind checkpoint"):
        files.read_sealed(tmp_path / "a", "checkpoint")
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        files.read_sealed(tmp_path / "gone", "checkpoint")


def test_a_sealed_file_may_be_named_by_text(tmp_path):
    sealed(str(tmp_path / "a"))
    assert files.read_sealed(str(tmp_path / "a"), "kind")[1] == {"name": "ü"}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_seal_that_cannot_be_written_leaves_the_old_file_and_nothing_else(old, monkeypatch, step):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        sealed(old)
    monkeypatch.undo()
    assert old.read_bytes() == b"old"
    assert names(old.parent) == ["model.bin"]


def test_a_description_that_is_no_json_leaves_the_old_file_and_nothing_else(old):
    with pytest.raises(TypeError, match="not JSON serializable"):
        sealed(old, {"path": old})
    assert old.read_bytes() == b"old"
    assert names(old.parent) == ["model.bin"]


def test_tensors_that_overlap_are_sealed_as_copies(tmp_path):
    import torch

    whole = torch.arange(6.0)
    files.write_sealed(tmp_path / "a", "kind", {"whole": whole, "part": whole[2:], "again": whole}, {})
    assert torch.equal(files.read_sealed(tmp_path / "a", "kind")[0]["part"], whole[2:])


def test_a_description_may_have_a_sha256_of_its_own(tmp_path):
    about = {"made from": {"sha256": "abc"}}
    sealed(tmp_path / "a", about)
    assert files.read_sealed(tmp_path / "a", "kind")[1] == about
