"""A service that watches a run from an event loop, and keeps a file of its own beside it."""

from __future__ import annotations

import asyncio

import torch

import cloudckpt
from cloudckpt import aio
from clouds import Place


def test_a_service_evaluates_what_a_training_saves(place: Place) -> None:
    uri, config = place.uri, place.config
    noted = f"{uri}/evaluated.json"

    def train() -> None:
        for step in (1, 2):
            state = {"w": torch.full((3000,), float(step))}
            cloudckpt.save(state, checkpoint_id=f"{uri}/step-{step}", config=config)

    async def serve() -> list[int | None]:
        training = asyncio.ensure_future(asyncio.to_thread(train))
        told = []
        async for checkpoint in aio.watch(uri, interval=0.2, config=config):
            assert await aio.exists(checkpoint.uri, config=config)
            assert (await aio.verify(checkpoint.uri, config=config)).items == 1
            told.append(checkpoint.step)
            if len(told) == 2:
                break
        await training
        assert await aio.latest(uri, config=config) == f"{uri}/step-2"
        found = await aio.list_checkpoints(uri, config=config)
        assert [(one.step, one.is_committed) for one in found] == [(1, True), (2, True)]
        return told

    told = asyncio.run(asyncio.wait_for(serve(), 200))
    assert told == [1, 2]
    cloudckpt.files.save_file(noted, str(told).encode(), config=config)
    content = cloudckpt.files.load_file(noted, config=config)
    assert content == b"[1, 2]"
    honoured = config.conditional_writes != "off"
    condition = {"if_version": content.version} if honoured else {}
    cloudckpt.files.save_file(noted, b"[]", **condition, config=config)
    assert asyncio.run(aio.load_file(noted, config=config)) == b"[]"
