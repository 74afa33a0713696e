"""Logs, code snapshots and job files are read from disk completely and safely."""

import contextlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from carpool.errors import InputError
from carpool.live import packing
from carpool.live.commands import job_file
from carpool.live.http import code_snapshot
from carpool.live.http.code_snapshot import Uploads, pack

# ---- snapshots -------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    for path, text in {
        "train.py": "print(1)",
        "src/model.py": "x = 1",
        "src/__pycache__/model.pyc": "compiled",
        ".git/config": "secret",
        "data/big.bin": "0" * 1000,
        "data/small.csv": "1,2",
        ".carpoolignore": "# not needed\ndata/big.bin\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("train.py")
    return folder


def packed(folder):
    file = io.BytesIO()
    found = pack(folder, file)
    file.seek(0)
    return file, found


def test_a_snapshot_is_the_directory_without_what_is_left_out(project, tmp_path):
    uploads = Uploads(tmp_path / "uploads")
    file, found = packed(project)
    name = uploads.add(file, "alice")
    with uploads.taken(name, "alice") as folder:
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
        assert there == {"train.py", "src/model.py", "data/small.csv", ".carpoolignore", "run.sh", "link"}
        assert (folder / "src/model.py").read_text() == "x = 1"
        assert os.access(folder / "run.sh", os.X_OK)
    assert found.files == 8  # six files, src and data
    assert list((tmp_path / "uploads").iterdir()) == []


def test_an_upload_serves_only_its_owner_and_only_once(project, tmp_path):
    uploads = Uploads(tmp_path / "uploads")
    name = uploads.add(packed(project)[0], "alice")
    with pytest.raises(InputError, match="no such upload"), uploads.taken(name, "bob"):
        pass
    with pytest.raises(ZeroDivisionError), uploads.taken(name, "alice"):
        raise ZeroDivisionError  # a refused request may be sent again
    with uploads.taken(name, "alice"):
        pass
    with pytest.raises(InputError, match="no such upload"), uploads.taken(name, "alice"):
        pass


@pytest.mark.parametrize("to", ["/etc", "../elsewhere", "sub/../../x"])
def test_a_link_that_leaves_is_named_before_anything_is_sent(project, to):
    (project / "elsewhere-data").symlink_to(to)
    with pytest.raises(InputError, match=r"'elsewhere-data' is a link to .*name it in .carpoolignore"):
        pack(project, io.BytesIO())
    with (project / ".carpoolignore").open("a") as file:
        file.write("\nelsewhere-data\n")
    pack(project, io.BytesIO())


def test_an_unreadable_file_is_named_in_one_line(project, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(packing, "open_regular", refuse)
    with pytest.raises(InputError, match=r"^--snapshot: .*: Permission denied; name it in"):
        pack(project, io.BytesIO())


def test_too_large_a_directory_is_refused_before_it_is_sent(project, monkeypatch):
    monkeypatch.setattr(code_snapshot, "MAX_BYTES", 20)
    with pytest.raises(InputError, match=r"holds more than .*carpoolignore"):
        packed(project)


@pytest.mark.parametrize("attack", ["../escape", "/etc/escape", "a/../../escape"])
def test_an_archive_cannot_write_outside(tmp_path, attack):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        info = tarfile.TarInfo(attack)
        info.size = 4
        archive.addfile(info, io.BytesIO(b"evil"))
    file.seek(0)
    (tmp_path / "deep").mkdir()
    with contextlib.suppress(InputError):
        Uploads(tmp_path / "deep" / "uploads").add(file, "alice")
    assert all(tmp_path / "deep" / "uploads" in path.parents for path in tmp_path.rglob("escape"))
    assert not os.path.exists("/etc/escape")


def test_unsafe_links_devices_and_huge_files_in_an_archive_are_refused(tmp_path, monkeypatch):
    for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.SYMTYPE, "../../x"), (tarfile.CHRTYPE, "")):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            info = tarfile.TarInfo("entry")
            info.type, info.linkname = kind, target
            archive.addfile(info)
        file.seek(0)
        with pytest.raises(InputError, match="safely"):
            Uploads(tmp_path / "uploads").add(file, "alice")
    monkeypatch.setattr(code_snapshot, "MAX_BYTES", 1000)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        info = tarfile.TarInfo("zeros")
        info.size = 10_000
        archive.addfile(info, io.BytesIO(bytes(10_000)))
    file.seek(0)
    with pytest.raises(InputError, match="holds more"):
        Uploads(tmp_path / "uploads").add(file, "alice")
    with pytest.raises(InputError, match="safely"):
        Uploads(tmp_path / "uploads").add(io.BytesIO(b"not an archive"), "alice")
    assert list((tmp_path / "uploads").iterdir()) == []


# ---- job files -------------------------------------------------------------------------------------------------------


def test_yaml_and_toml_files_give_the_same_job(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "name: resnet\ncommand: python train.py --lr '0.1 x'\ngpus: 2\nbatch_size: 64\ntime: 2h\nmemory: 8GiB\n"
        "after: 7\nenv: {SEED: 3}\nexclusive: true\ndirectory: sub\n"
    )
    (tmp_path / "job.toml").write_text(
        'name = "resnet"\ncommand = ["python", "train.py", "--lr", "0.1 x"]\ngpus = 2\nbatch = 64\nduration = 7200\n'
        'memory = "8GiB"\nafter = ["7"]\nexclusive = true\ndirectory = "sub"\n[env]\nSEED = "3"\n'
    )
    read = job_file.read(tmp_path / "job.yaml")
    assert read == job_file.read(tmp_path / "job.toml")
    assert read["command"] == ["python", "train.py", "--lr", "0.1 x"]
    assert (read["duration_s"], read["memory"], read["batch"]) == (7200, 8 << 30, 64)
    assert read["directory"] == str(tmp_path / "sub")
    (tmp_path / "home.yaml").write_text("command: x\ndirectory: ~/sub\n")
    assert job_file.read(tmp_path / "home.yaml")["directory"] == str(Path.home() / "sub")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "gpu: 2", "did you mean gpus"),
        ("a.yaml", "- 1", "must hold the fields"),
        ("a.yaml", "a: [", "line 1"),
        ("a.toml", "a = ", "Invalid value"),
        ("a.yaml", "command: 'echo \"'", "close the quotes"),
        ("a.yaml", "time: soon", "such as"),
        ("a.yaml", "memory: 8", "must be a whole number of bytes"),
        ("a.yaml", "gpus: two", "must be a whole number"),
        ("a.yaml", "time: 1h\nduration: 2h", "given twice"),
        ("a.yaml", "env: {A: [1]}", "put quotes"),
        ("a.yaml", "env: 5", "mapping of names to values"),
        ("a.yaml", "snapshot: later", "true or false"),
        ("a.yaml", "after: [[1]]", "must be text"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_wrong_job_files_get_one_line(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=said) as error:
        job_file.read(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_binary_job_file_is_named(tmp_path):
    with pytest.raises(InputError, match="there is no such job file"):
        job_file.read(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match="UTF-8"):
        job_file.read(tmp_path / "a.yaml")


# ---- quotas ----------------------------------------------------------------------------------------------------------


def test_one_user_cannot_fill_the_disk_with_uploads(project, tmp_path, monkeypatch):
    monkeypatch.setattr(code_snapshot, "MAX_UNUSED", 2)
    uploads = Uploads(tmp_path / "uploads")
    for _ in range(2):
        uploads.add(packed(project)[0], "alice")
    with pytest.raises(InputError, match="not used by a job"):
        uploads.add(packed(project)[0], "alice")
    name = uploads.add(packed(project)[0], "bob")
    monkeypatch.setattr(code_snapshot, "MAX_UNUSED_BYTES", 1)
    with pytest.raises(InputError, match="not used by a job"):
        uploads.add(packed(project)[0], "bob")
    with uploads.taken(name, "bob"):
        pass
    uploads.add(packed(project)[0], "bob")


def test_uploads_without_a_job_are_removed_also_by_the_next_service(project, tmp_path, monkeypatch):
    uploads = Uploads(tmp_path / "uploads")
    uploads.add(packed(project)[0], "alice")
    (tmp_path / "uploads" / ".unpacking-x").mkdir()
    later = Uploads(tmp_path / "uploads")
    later.forget_old()
    assert len(list((tmp_path / "uploads").iterdir())) == 2, "a job may still come"
    monkeypatch.setattr(code_snapshot, "KEPT_S", -1.0)
    later.forget_old()
    assert list((tmp_path / "uploads").iterdir()) == []


def test_a_name_that_is_twice_in_a_yaml_file_is_refused(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("command: a\ngpus: 1\nenv:\n  A: x\n  A: y\n")
    with pytest.raises(InputError, match="line 5: 'A' is there twice"):
        job_file.read(path)
    path.write_text("command: a\ngpus: 1\ngpus: 4\n")
    with pytest.raises(InputError, match="line 3: 'gpus' is there twice"):
        job_file.read(path)


def test_several_lines_are_a_script_and_one_line_needs_no_shell(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("command: |\n  cd data\n  python train.py | tee log\n")
    assert job_file.read(path)["command"] == ["sh", "-e", "-c", "cd data\npython train.py | tee log\n"]
    path.write_text("command: |\n  python train.py --name 'a|b'\n")
    assert job_file.read(path)["command"] == ["python", "train.py", "--name", "a|b"]
    for line in ("python train.py | tee log", "cd data && python train.py", "python train.py > log", "a 2>&1"):
        path.write_text(f"command: {line}\n")
        with pytest.raises(InputError, match="needs a shell"):
            job_file.read(path)
