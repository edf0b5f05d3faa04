from __future__ import annotations

import sys

import pytest

import cloudckpt
from cloudckpt.demo.bucket import bucket_of_user

pytest.importorskip("moto", reason="the demo needs the extra 'demo'")


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture
def demo_result(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Replaces the demo; holds what it was called with, and what it is to return or raise."""
    called: dict[str, object] = {"returns": True}

    def run(location: str | None, *, steps: int, keep: bool, console: object) -> object:
        called.update(location=location, steps=steps, keep=keep)
        if isinstance(called["returns"], Exception):
            raise called["returns"]
        return called["returns"]

    monkeypatch.setattr("cloudckpt.demo.run.run", run)
    return called


@pytest.mark.parametrize("package", ["moto", "flask", "boto3", "numpy"])
def test_demo_without_its_packages_says_what_to_install(
    cli, monkeypatch, demo_result, package, capsys
):
    without(monkeypatch, package)
    assert cli("demo") == 1
    message = capsys.readouterr().err
    assert package in message
    assert "pip install 'cloudckpt[demo]'" in message
    assert "steps" not in demo_result, "the demo must not start"


@pytest.mark.parametrize("uri", ["s3://bucket/runs", "gs://bucket", "az://box/runs", "/a/folder"])
def test_demo_on_a_place_of_the_user_needs_no_package_of_the_embedded_server(
    cli, monkeypatch, demo_result, uri
):
    for package in ("moto", "flask", "boto3"):
        without(monkeypatch, package)
    assert cli("demo", "--uri", uri) == 0
    assert demo_result["location"] == uri


def test_demo_on_a_place_of_the_user_says_what_it_needs(cli, monkeypatch, demo_result, capsys):
    without(monkeypatch, "numpy")
    assert cli("demo", "--uri", "gs://bucket") == 1
    assert "this command needs numpy; " in capsys.readouterr().err


@pytest.mark.parametrize("keep", [False, True])
def test_demo_leaves_in_a_folder_of_the_user_what_it_is_told_to(tmp_path, keep):
    (tmp_path / "mine").write_text("")
    with bucket_of_user(str(tmp_path), keep=keep) as run:
        cloudckpt.save({"step": 1}, checkpoint_id=run.join("step-1"), no_dist=True)
    assert (tmp_path / "mine").exists()
    assert len(list(tmp_path.iterdir())) == (2 if keep else 1)


def test_version_needs_no_package_of_the_demo(cli, monkeypatch):
    without(monkeypatch, "moto")
    assert cli("--version") == 0


def test_demo_passes_its_options_on(cli, demo_result):
    arguments = ("demo", "--uri", "s3://bucket/runs", "--steps", "12", "--keep")
    assert cli(*arguments) == 0
    assert demo_result["location"] == "s3://bucket/runs"
    assert demo_result["steps"] == 12
    assert demo_result["keep"] is True


def test_failed_check_of_the_demo_is_a_failure_of_the_command(cli, demo_result, capsys):
    demo_result["returns"] = False
    assert cli("demo") == 1
    assert "a check" in capsys.readouterr().err


def test_failed_rank_is_told_without_a_traceback(cli, demo_result, capsys):
    from cloudckpt.demo.children import ChildError

    demo_result["returns"] = ChildError("rank(s) [1] failed")
    assert cli("demo") == 1
    assert capsys.readouterr().err == "cloudckpt: the demo failed: rank(s) [1] failed\n"


def test_bad_bucket_is_told_without_a_traceback(cli, demo_result, capsys):
    demo_result["returns"] = cloudckpt.BucketNotFoundError("no such bucket", uri="s3://nowhere")
    assert cli("demo") == 1
    assert capsys.readouterr().err == "cloudckpt: no such bucket | at s3://nowhere\n"


def test_keep_without_a_bucket_is_a_usage_error(cli, demo_result, capsys):
    assert cli("demo", "--keep") == 2
    assert "--keep needs --uri" in capsys.readouterr().err
    assert "steps" not in demo_result, "the demo must not start"


def test_too_few_steps_are_a_usage_error(cli, demo_result):
    assert cli("demo", "--steps", "5") == 2
    assert "steps" not in demo_result, "the demo must not start"


@pytest.mark.parametrize("uri", ["nonsense://x/y", "memory://x"])
def test_demo_refuses_a_place_that_its_ranks_can_not_share(cli, uri, capsys):
    assert cli("demo", "--uri", uri) == 1
    assert "s3://" in capsys.readouterr().err
