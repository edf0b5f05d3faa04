"""Hugging Face Accelerate: an ``Accelerator`` whose ``save_state`` and ``load_state`` take URIs.

>>> from cloudckpt.integrations.accelerate import CloudAccelerator  # doctest: +SKIP
>>> accelerator = CloudAccelerator(fsdp_plugin=plugin)  # doctest: +SKIP
>>> accelerator.save_state("s3://bucket/run/step-10")  # doctest: +SKIP
>>> accelerator.load_state(cloudckpt.latest("s3://bucket/run"))  # doctest: +SKIP

A checkpoint has the models as ``model_0`` and so on, the optimizers as ``optimizer_0``, tensor by
tensor, and the small files that Accelerate writes (random states, schedulers, samplers, the scaler,
registered objects) as one value. Tested with accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from cloudckpt import api
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    MissingDependencyError,
)
from cloudckpt.integrations.parts import VALUES, Parts, keep_newest, packed, uri_of
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.steps import Retention

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.accelerate needs Accelerate: pip install 'accelerate>=1.8'"
    ) from exc

__all__ = ["CloudAccelerator"]

_OWN_FORMATS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class CloudAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerate's ``Accelerator``, which saves its state to URIs, too.

    All ranks save their shards, in one commit, and load them on any number of ranks. Paths that
    are no URIs go Accelerate's way. With ``automatic_checkpoint_naming`` and a ``project_dir`` that
    is a URI, checkpoints are ``<project_dir>/checkpoints/checkpoint_<iteration>``, and
    ``total_limit`` of them are kept.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, config: Config | None = None, **kwargs: Any) -> None:
        """
        Args:
            *args: Accelerate's.
            config: The options of saving and loading.
            **kwargs: Accelerate's.
        """
        super().__init__(*args, **kwargs)
        self._config = config if config is not None else Config()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Any:
        """Saves on all ranks; to a URI, or where Accelerate would.

        Hooks that were registered for saving are called with no models, and with the folder of
        which the files are saved.

        Returns:
            The URI.

        Raises:
            ConfigError: If the state can't be saved tensor by tensor (DeepSpeed, Megatron-LM).
            CheckpointExistsError: If an automatic name is taken.
            CloudCheckpointError: As :func:`cloudckpt.save`.
        """
        project, naming, config = self.project_configuration, self._run(), self._config
        place: Any = output_dir
        if naming is not None:
            place = naming.uri(project.iteration)
            config = dataclasses.replace(config, overwrite=False)  # as Accelerate does
        elif project.automatic_checkpoint_naming:
            place = None
        uri = None if place is None else uri_of(place)
        if uri is None:
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        parts, meeting = self._parts(uri), Meeting.of(None, False)

        def small_files() -> dict[str, bytes]:
            with tempfile.TemporaryDirectory() as folder, self._of_small_files():
                Accelerator.save_state(self, folder, safe_serialization)
                return _content(folder)

        found = meeting.gathered(meeting.begin(small_files))
        state = parts.state_dicts()
        if meeting.rank == 0:
            state[VALUES] = packed({name: data for files in found for name, data in files.items()})
        api.save(state, checkpoint_id=uri, config=config)
        if naming is not None and meeting.rank == 0:
            keep_newest(naming, Retention(max_to_keep=project.total_limit))
        return uri

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Loads on all ranks; from a URI, or where Accelerate would.

        Without ``input_dir``, the newest that was saved by an automatic name. A rank that there was
        not when it was saved keeps its random states.

        Raises:
            CheckpointNotFoundError: If there is no committed checkpoint.
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        uri = self._newest() if input_dir is None else uri_of(input_dir)
        if uri is None:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        files = self._parts(uri).load(uri, self._config)

        def load_files() -> None:
            with tempfile.TemporaryDirectory() as folder, self._of_small_files():
                for name, data in files.items():
                    path = os.path.join(folder, os.path.basename(name))
                    with open(path, "wb") as file:
                        file.write(data)
                Accelerator.load_state(self, folder, load_kwargs, **load_model_func_kwargs)

        Meeting.of(None, False).begin(load_files)

    def _parts(self, uri: str) -> Parts:
        if self.distributed_type in _OWN_FORMATS:
            raise ConfigError(
                f"{self.distributed_type} writes files of its own: save to a folder", uri=uri
            )
        models, optimizers = self._models, self._optimizers
        if len(optimizers) > len(models):
            raise ConfigError(
                f"there are {len(optimizers)} optimizers and {len(models)} models: prepare one "
                "model for each, in the same order",
                uri=uri,
            )
        pairs = zip(models, optimizers, strict=False)
        return Parts(
            {f"model_{index}": model for index, model in enumerate(models)},
            {
                f"optimizer_{index}": (model, optimizer.optimizer)
                for index, (model, optimizer) in enumerate(pairs)
            },
        )

    @contextlib.contextmanager
    def _of_small_files(self) -> Iterator[None]:
        """Within it, Accelerate's functions see neither models nor optimizers, nor name folders."""
        kept = self._models, self._optimizers
        naming = self.project_configuration.automatic_checkpoint_naming
        self._models, self._optimizers = [], []
        self.project_configuration.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            self._models, self._optimizers = kept
            self.project_configuration.automatic_checkpoint_naming = naming

    def _run(self) -> Run | None:
        """Where checkpoints with automatic names are, if that is a URI."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming or self.project_dir is None:
            return None
        root = uri_of(self.project_dir)
        if root is None:
            return None
        return Run(f"{root}/checkpoints", step_name="checkpoint_{step}", config=self._config)

    def _newest(self) -> str | None:
        run = self._run()
        if run is None:
            return None
        first = Meeting.of(None, False).told_by_first(lambda: next(run.committed_steps(), None))
        if first is None:
            raise CheckpointNotFoundError("no checkpoint was saved yet", uri=str(run.root))
        return str(run.uri(first))


def _content(folder: str) -> dict[str, bytes]:
    found = {}
    for entry in os.scandir(folder):
        with open(entry.path, "rb") as file:
            found[entry.name] = file.read()
    return found
