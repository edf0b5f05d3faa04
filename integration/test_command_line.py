"""Each command of the command line, in a process of its own, on each cloud."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import cloudckpt
import cloudckpt.hf
from cloudckpt.cli import main
from clouds import Cloud, Place
from runs.orphans import job, settled
from support.forks import child

# What is typed, its exit code, and a pattern of what is printed. {run} has step-1, step-2 and what
# a killed save has left; {local} is an empty folder of this machine.
COMMANDS = {
    "ls": ("ls {run}", 0, r"1\tcommitted\t.*\t{run}/step-1\n2\tcommitted\t.*\t{run}/step-2\n"),
    "latest": ("latest {run}", 0, r"{run}/step-2\n"),
    "ls of nothing": ("ls {run}/nothing", 3, ""),
    "du": ("du {run}", 0, r"kB\t0 bytes\t.* bytes\t3\t{run}\n"),
    "latest of nothing": ("latest {run}/nothing", 3, ""),
    "best": ("best {run} --metric loss --mode max", 0, r"{run}/step-1\n"),
    "inspect": ("inspect {run}/step-2 w*", 0, r"w\tfloat32\t500 x 3\t6.0 kB\t1\n"),
    "verify": ("verify {run}/step-2", 0, r"intact\t2\t"),
    "cp within": ("cp {run} {run}/copy", 0, r"2\t2\t.*\t{run}/copy\n"),
    "cp from": ("cp {run}/step-2 {local}/copy", 0, r"1\t1\t.*\t0 bytes\t0\t{local}/copy\n"),
    "diff": ("diff {run}/step-1 {run}/step-2", 1, r"changed\tw\tfloat32 500 x 3\t.*6.0 kB\n"),
    "cp": ("cp {run}/step-2 {run}/copy", 0, r"1\t1\t.*\t{run}/copy\n"),
    "unshare": ("unshare {run}/changes/step-2", 0, r"unshared\t[0-9.]+ kB\t"),
    "doctor": ("doctor {run} --size 1", 0, r"ok\tmultipart\t(.*\n)*ok\tclean-up\t"),
    "convert": ("convert {run}/step-2 {local}/model.pt", 0, r"dcp\ttorch\t"),
    "export": ("export {run}/step-2 {run}/made", 0, r"1\t1\t.*\t{run}/made\n"),
    "import": ("import {run}/model {local}/new", 0, r"1\t{run}/model\t{local}/new\n"),
    "rm": ("rm {run}/step-1 {run}/step-2 --yes", 0, r"deleted\t{run}/step-1\ndeleted"),
    "rm of a run": ("rm {run} --recursive --yes", 0, r"deleted\t{run}/step-1\n(.*\n)*.*step-3\n"),
    "prune": ("prune {run} --max-to-keep 1 --yes", 0, r"deleted\t{run}/step-1\n"),
    "recover": ("recover {run}/killed/step-1", 0, r"committed\t{run}/killed/step-1\n"),
    "sweep": ("sweep {run} --older-than 0 --yes", 0, r"deleted\t{run}/step-3/"),
}


@pytest.fixture
def run(place: Place, cloud: Cloud) -> str:
    """A run of two steps, and what a save that was killed has left."""
    with cloudckpt.CheckpointManager(
        place.uri,
        asynchronous=False,
        checkpointer=cloudckpt.checkpointer.CheckpointerConfig(config=place.config),
        preemption=cloudckpt.runs.Preemption(signals=()),
    ) as manager:
        for step in (1, 2):
            state = {"w": torch.full((500, 3), float(step)), "step": step}
            manager.save(step, state, metrics={"loss": 1 / step})
    cloudckpt.hf.save({"w": torch.ones(5)}, f"{place.uri}/model", config=place.config)
    cloud.look.put(f"{place.key}/step-3/__0_0.0123456789abcdef.distcp", b"left over")
    return place.uri


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_does_what_it_says(name, run, place, cloud, tmp_path):
    command, code, printed = COMMANDS[name]
    if name == "recover":
        where = {"run": f"{run}/killed", "config": place.config}
        job(tmp_path, **where, last=1, dies_at=1, how="at its commit")
        assert settled()
    if name == "unshare":
        for step in (1, 2):
            state = {"w": torch.zeros(500, 3), "step": step}
            config = dataclasses.replace(place.config, incremental=True)
            cloudckpt.save(state, checkpoint_id=f"{run}/changes/step-{step}", config=config)
    places = {"run": run, "local": str(tmp_path)}
    arguments = shlex.split(command.format(**places))
    with child(_typed, arguments=arguments, folder=str(tmp_path), **cloud.environment) as typed:
        ended = typed.wait()[1]
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert (ended, "Traceback" in err) == (code, False), err
    for place, where in places.items():
        printed = printed.replace("{" + place + "}", re.escape(where))
    assert re.search(printed, out), out


def _typed(arguments: list[str], folder: str, **environment: str) -> object:
    """The exit code of a command, whose output is in two files then."""
    for name, mode, number in (("/dev/null", "rb", 0), ("out", "wb", 1), ("err", "wb", 2)):
        with open(Path(folder) / name, mode) as file:
            os.dup2(file.fileno(), number)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0
