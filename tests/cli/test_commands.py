"""What each command prints, what its exit code is, and what it does to a run."""

from __future__ import annotations

import shlex

import pytest
import torch
import torch.distributed.checkpoint

import cloudckpt
from cli.test_tampered import of_tensor
from cloudckpt import Config
from cloudckpt.errors import AccessDeniedError
from cloudckpt.stores import registry
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

STEP_4 = "PATH/run/step-4"
SHOWN = {
    "ls PATH/run": """
        1 | committed | SIZE | AGE | URI/run/step-1
        2 | incomplete | SIZE | AGE | URI/run/step-2
        3 | committed | SIZE | AGE | URI/run/step-3
        4 | committed | SIZE | AGE | URI/run/step-4
        5 | committed | SIZE | AGE | URI/run/step-5""",
    "ls PATH": "5 | 5 | AGE | URI/run",
    "ls 'PATH/r*'": "5 | 5 | AGE | URI/run",
    "ls 'PATH/*/step-[45]*'": """
        4 | committed | SIZE | AGE | URI/run/step-4
        5 | committed | SIZE | AGE | URI/run/step-5""",
    "ls PATH/run/step-1 PATH/run/logs PATH/run/step-2": """
        1 | committed | SIZE | AGE | URI/run/step-1
        2 | incomplete | SIZE | AGE | URI/run/step-2""",
    "du PATH": "SIZE | SIZE | SIZE | 5 | URI/run",
    "latest PATH/run": "URI/run/step-5",
    "best PATH/run --metric loss --mode min": "URI/run/step-3",
    "best PATH/run --metric loss --mode max": "URI/run/step-5",
    f"inspect {STEP_4}": """
        step | value |  | SIZE | 1
        w | float32 | 500 x 3 | SIZE | 1""",
    f"inspect {STEP_4} w* --html PATH/page": "PATH/page",
    f"verify {STEP_4}": f"intact | 2 | SIZE | {STEP_4}",
    f"diff {STEP_4} {STEP_4}": "",
    f"recover {STEP_4}": f"committed | {STEP_4}",
    "recover PATH/run/step-2 --dry-run": "incomplete | PATH/run/step-2",
    f"unshare {STEP_4}": f"already self-contained | SIZE | {STEP_4}",
    f"unshare {STEP_4} --dry-run": f"SIZE | {STEP_4}",
    f"cp {STEP_4} PATH/copy": "1 | 1 | SIZE | SIZE | 0 | PATH/copy",
    f"cp {STEP_4} PATH/copy --dry-run": "SIZE | URI/run/step-4 | URI/copy",
    "cp PATH/run PATH/copy": "4 | 4 | SIZE | SIZE | 0 | PATH/copy",
    "cp PATH/run PATH/copy --dry-run": """
        SIZE | URI/run/step-1 | URI/copy/step-1
        SIZE | URI/run/step-3 | URI/copy/step-3
        SIZE | URI/run/step-4 | URI/copy/step-4
        SIZE | URI/run/step-5 | URI/copy/step-5""",
    f"cp {STEP_4} PATH/copy --quiet": "",
    f"convert {STEP_4} PATH/model.pt": f"dcp | torch | {STEP_4} | PATH/model.pt",
    f"convert {STEP_4} PATH/model.pt --dry-run": f"dcp | torch | {STEP_4} | PATH/model.pt",
    f"export {STEP_4} PATH/model": "1 | 1 | SIZE | SIZE | PATH/model",
    f"export {STEP_4} PATH/model --dry-run": "1 | SIZE | PATH/model",
    "rm PATH/run/step-1 'PATH/run/step-3*' --yes": """
        deleted | URI/run/step-1
        deleted | URI/run/step-3""",
    "rm PATH/run/step-1 --dry-run": "would delete | URI/run/step-1",
    "rm PATH/run --recursive --dry-run": """
        would delete | URI/run/step-1
        would delete | URI/run/step-2
        would delete | URI/run/step-3
        would delete | URI/run/step-4
        would delete | URI/run/step-5""",
    "prune PATH/run --max-to-keep 1 --keep-period 3 --dry-run": """
        would delete | URI/run/step-1
        would delete | URI/run/step-4""",
    "prune PATH/run --best-to-keep 1 --best-metric loss --best-mode min --yes": """
        deleted | URI/run/step-1
        deleted | URI/run/step-4""",
    "prune PATH/run --max-to-keep 9 --yes": "",
    "sweep PATH/run --yes": "",  # all of it is young
}


def typed(command: str, folder) -> list[str]:
    return shlex.split(command.replace("PATH", str(folder)))


@pytest.mark.parametrize("command", SHOWN)
def test_in_a_pipe_a_command_prints_one_table_or_strict_json(cli, run, tmp_path, command):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = typed(command, tmp_path)
    ended = cli(*arguments)
    expected = [line.strip() for line in SHOWN[command].strip().splitlines()]
    assert (ended.code, ended.shown(tmp_path).splitlines()) == (0, expected), ended.err
    assert ended.err == ""
    if "--dry-run" in command:
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert after == before
        assert cli(*arguments, "--json").json["dry_run"] is True
    elif not {"rm", "prune"} & set(arguments):
        assert cli(*arguments, "--json").json is not None


FAILING = {
    "ls PATH/nothing": (3, "no checkpoints"),
    "ls 'PATH/x*'": (3, "matches"),
    "ls 's3://*/run'": (2, "name of the bucket"),
    f"ls {STEP_4}": (2, "URI/run"),  # the run is named
    "verify PATH/run": (3, "URI/run/step-5"),
    "latest PATH/nothing": (3, "no committed checkpoint"),
    "best PATH/run --metric accuracy --mode max": (3, "accuracy"),
    "best PATH/run --metric loss": (2, "--mode"),
    f"inspect {STEP_4} --html PATH/no/x.html": (1, "No such file"),
    f"diff PATH/run/step-1 {STEP_4}": (1, ""),
    f"diff PATH/run/step-1 {STEP_4} w --json": (1, ""),
    f"diff {STEP_4} PATH/run/step-2": (3, "no committed checkpoint"),
    f"diff {STEP_4} {STEP_4} modle.*": (2, "matches no entry"),
    f"diff {STEP_4} s3:/typo": (2, "typo"),
    f"cp {STEP_4} {STEP_4}": (2, "the same"),
    f"cp {STEP_4} PATH/run/step-5 --no-overwrite --dry-run": (1, "overwrite is off"),
    f"cp {STEP_4}": (2, "target"),
    f"convert {STEP_4} PATH/run": (2, "folder of a run"),
    f"export {STEP_4} PATH/run": (2, "folder of a run"),
    "import PATH/run/logs PATH/run": (2, "folder of a run"),
    "recover PATH/run": (2, "folder of a run"),
    "recover PATH/run/step-2": (1, "no saving process has left anything"),
    "recover PATH/run/step-77": (3, "there is no checkpoint"),
    "recover PATH/run/step-77 --dry-run": (3, "no checkpoints"),
    f"recover {STEP_4} --wait 60": (2, "90s"),
    "rm PATH/run --yes": (3, "--recursive"),
    f"rm {STEP_4}": (2, "--yes"),
    "rm PATH/run/step-8 --dry-run": (3, "no committed checkpoint"),
    "prune PATH/run --max-to-keep 1 --best-metric loss": (2, "best_mode"),
    f"verify {STEP_4} --endpoint-url http://x": (2, "--endpoint-url"),
    "cp s3://a/b gs://c/d --endpoint-url http://x": (2, "several clouds"),
}


@pytest.mark.parametrize("command", FAILING)
def test_what_fails_says_why_on_stderr_and_by_the_exit_code(cli, run, tmp_path, command):
    code, told = FAILING[command]
    before = sorted(path for path in tmp_path.rglob("*"))
    ended = cli(*typed(command, tmp_path))
    assert ended.code == code, ended.err
    words = " ".join(ended.err.replace("│", " ").split())
    assert told.replace("URI", tmp_path.as_uri()) in words
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_verify_lists_each_damaged_range(cli, run):
    of_tensor(run / "step-5")
    ended = cli("verify", run / "step-5", "--quiet")
    [[item, uri, what, start, stop]] = ended.rows
    assert (item, uri.rpartition("/")[0]) == ("w", (run / "step-5").as_uri())
    assert int(start) <= 2000 < int(stop)
    [damage] = cli("verify", run / "step-5", "--json").json["damages"]
    assert list(damage.values()) == [item, uri, what, int(start), int(stop)]


def test_ls_of_a_bucket_finds_the_runs_beneath(cli, bucket, s3_url):
    for folder in ("run", "team/a/b", "team/with.dots/epochs"):
        for name in ("step-9", "step-10") if folder != "team/with.dots/epochs" else ("last",):
            cloudckpt.save(
                {"w": torch.ones(2)},
                checkpoint_id=f"s3://{bucket}/{folder}/{name}",
                config=Config(s3=cloudckpt.S3Options(endpoint_url=s3_url)),
            )
    of_store = ("--endpoint-url", s3_url, "--region", "us-east-1", "--concurrency", "2")
    found = cli("ls", f"s3://{bucket}", *of_store)
    assert [(row[0], row[1], row[3]) for row in found.rows] == [
        ("10", "2", f"s3://{bucket}/run"),
        ("10", "2", f"s3://{bucket}/team/a/b"),
        ("", "0", f"s3://{bucket}/team/with.dots/epochs"),
    ]
    assert cli("ls", f"s3://{bucket}/te*/a/b/step-1*", *of_store).rows[0][0] == "10"
    assert cli("rm", f"s3://{bucket}/team", "-r", "-y", *of_store).code == 0
    assert [row[3] for row in cli("ls", f"s3://{bucket}", *of_store).rows] == [f"s3://{bucket}/run"]


def test_rm_recursive_deletes_a_run_and_nothing_of_others(cli, run, tmp_path):
    (run / "step-1" / "notes.txt").write_text("mine, too")
    assert cli("rm", run, "--recursive", "--yes").code == 0
    left = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    assert sorted(map(str, left)) == ["logs/events", "step-1/notes.txt"]
    assert cli("ls", tmp_path).code == 3


def test_rm_recursive_that_is_interrupted_leaves_no_half_of_a_checkpoint(cli, run, monkeypatch):
    from cloudckpt.runs import deleting

    deleted, real = [], deleting.delete_all

    def once_only(store, keys, *rest, **options):
        if deleted:
            raise KeyboardInterrupt
        deleted.extend(keys)
        real(store, keys, *rest, **options)

    monkeypatch.setattr(deleting, "delete_all", once_only)
    assert cli("rm", run, "--recursive", "--yes").code == 130
    assert [row[1] for row in cli("ls", run).rows].count("incomplete") == 2  # one was before


@pytest.mark.parametrize(
    ("option", "action"), [("--yes", "deleted"), ("--dry-run", "would delete")]
)
def test_rm_deletes_what_is_there_and_names_all_that_is_not(cli, run, option, action):
    (run / "step-3" / ".metadata").write_bytes(b"damaged")
    ended = cli("rm", *(run / f"step-{step}" for step in (1, 8, 9, 3)), option)
    assert ended.code == 3
    assert ended.rows == [[action, (run / f"step-{step}").as_uri()] for step in (1, 3)]
    assert all(f"step-{step}" in ended.err for step in (8, 9))


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        ("rm RUN/step-3 RUN/step-[3-5]* RUN/step-[45]*", [3, 4, 5]),
        ("rm -r RUN/.. RUN RUN/step-3", [1, 2, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize(
    ("option", "action"), [("--dry-run", "would delete"), ("--yes", "deleted")]
)
def test_rm_deletes_and_names_once_what_is_given_twice(cli, run, command, steps, option, action):
    ended = cli(
        *command.replace("RUN/..", str(run.parent)).replace("RUN", str(run)).split(), option
    )
    assert (ended.code, ended.err) == (0, "")
    assert ended.rows == [[action, (run / f"step-{step}").as_uri()] for step in steps]


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("prune RUN --max-to-keep 1 --yes", ["deleted"]),
        ("rm RUN -r --yes", ["kept", "kept"]),
        ("rm RUN/step-1 RUN/step-2 RUN/step-3 --yes", ["kept"]),
    ],
)
@pytest.mark.parametrize(("refused", "action"), [(".metadata", "kept"), (".distcp", "deleted")])
def test_deletions_that_fail_midway_list_what_is_deleted_and_what_is_kept(
    cli, monkeypatch, command, others, refused, action
):
    store = FaultyStore(MemoryStore(f"midway{refused}"))
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: store})
    run = f"{store.root}/{len(command)}"
    for step in range(1, 5):
        cloudckpt.save({"w": torch.ones(2)}, checkpoint_id=f"{run}/step-{step}")
    is_refused = lambda key: "step-2/" in key and key.endswith(refused)  # noqa: E731
    store.fail("delete", AccessDeniedError, where=is_refused)
    actions = ["deleted", action, *others]
    ended = cli(*command.replace("RUN", run).split())
    assert (ended.code, "injected" in ended.err) == (1, True)
    assert [row[0] for row in ended.rows] == actions
    assert [row[1] for row in ended.rows] == [f"{run}/step-{n + 1}" for n in range(len(actions))]
    assert all(cloudckpt.exists(uri) == (action == "kept") for action, uri in ended.rows)


def test_rm_asks_on_a_terminal(cli, monkeypatch, run):
    answers = [False, True]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question: answers.pop(0))
    assert cli("rm", run / "step-1").code == 1
    assert (run / "step-1" / ".metadata").exists()
    assert cli("rm", run / "step-1").code == 0
    assert not (run / "step-1" / ".metadata").exists()


def test_ls_shows_what_is_kept_for_later_steps(cli, tmp_path):
    for step in (1, 2):
        state = {"frozen": torch.arange(100_000), "step": step}
        config = Config(incremental=True)
        cloudckpt.save(state, checkpoint_id=str(tmp_path / f"step-{step}"), config=config)
    cloudckpt.delete(str(tmp_path / "step-1"))
    assert [row[1] for row in cli("ls", tmp_path).rows] == ["kept", "committed"]
    assert cli("unshare", tmp_path / "step-2").rows[0][0] == "unshared"


def test_sweep_deletes_what_it_has_shown_and_nothing_else(cli, run, monkeypatch):
    shown = run / "step-2" / "__0_0.0123456789abcdef.distcp"
    later = run / "step-2" / "__0_0.fedcba9876543210.distcp"
    saved = next((run / "step-5").glob("*.distcp"))
    shown.write_bytes(b"x" * 1000)
    every = ("sweep", run, "--older-than", "0")
    assert ["would delete", shown.as_uri()] in cli(*every, "--dry-run").rows
    (run / "step-5" / ".metadata").rename(run / "step-5" / "elsewhere")

    def answer(question: str) -> bool:
        assert "Delete 3 objects" in question  # with those of the incomplete checkpoint
        later.write_bytes(b"x" * 1000)
        (run / "step-5" / "elsewhere").rename(run / "step-5" / ".metadata")
        return True

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", answer)
    assert [row[0] for row in cli(*every).rows] == ["deleted"] * 2
    assert (later.exists(), saved.exists(), shown.exists()) == (True, True, False)
    assert (run / "logs" / "events").exists()


@pytest.mark.parametrize(
    ("variable", "option", "code"),
    [
        ("1", (), 0),
        ("0", (), 1),
        ("", (), 0),
        ("0", ("--overwrite",), 0),
        ("1", ("--no-overwrite",), 1),
    ],
)
@pytest.mark.parametrize("command", ["cp", "convert", "export"])
def test_overwriting_is_told_by_the_option_else_the_variable_else_it_is_done(
    cli, run, tmp_path, monkeypatch, command, variable, option, code
):
    target = tmp_path / ("model.pt" if command == "convert" else "target")
    assert cli(command, run / "step-3", target).code == 0
    monkeypatch.setenv("CLOUDCKPT_OVERWRITE", variable)
    assert cli(command, run / "step-4", target, *option).code == code


def test_diff_shows_what_differs_and_what_it_can_not_tell(cli, run, tmp_path):
    torch.distributed.checkpoint.save(
        {"w": torch.ones(500, 3), "step": 1}, checkpoint_id=str(tmp_path / "torch"), no_dist=True
    )
    ended = cli("diff", run / "step-1", run / "step-4")
    assert ended.shown(tmp_path).splitlines() == [
        "changed | step | value | value | SIZE",
        "changed | w | float32 500 x 3 | float32 500 x 3 | SIZE",
    ]
    assert cli("diff", run / "step-1", run / "step-4", "--json").json["are_same"] is False
    ended = cli("diff", run / "step-1", tmp_path / "torch")
    assert (ended.code, {row[0] for row in ended.rows}) == (2, {"unknown"})
    assert "can't be compared by their checksums (verdict: unknown), and may differ: 2" in ended.err
