"""Checkpoints in Azurite, from end to end: az:// as a user meets it."""

import uuid

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from azure.storage.blob import BlobServiceClient
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from cloudckpt import AzureOptions, CheckpointConflictError, CheckpointURI, Config
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.stores.registry import open_store

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def service(azurite):
    with BlobServiceClient.from_connection_string(azurite.connection_string) as client:
        yield client


@pytest.fixture
def container(azurite, service, monkeypatch):
    """The URI of a new container, whose account and key are in the environment."""
    name = f"runs-{uuid.uuid4().hex[:12]}"
    service.create_container(name)
    monkeypatch.setenv("CLOUDCKPT_AZURE_ENDPOINT_URL", azurite.url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", azurite.account)
    monkeypatch.setenv("AZURE_STORAGE_KEY", azurite.key)
    return f"az://{name}"


def names(service, container):
    client = service.get_container_client(container.removeprefix("az://"))
    return sorted(blob.name for blob in client.list_blobs(include=["uncommittedblobs"]))


def big(value):
    """A state of several parts."""
    return {"weights": torch.full((40 * MIB,), value, dtype=torch.uint8), "step": value}


def loaded(uri, **options):
    state = {"weights": torch.zeros(40 * MIB, dtype=torch.uint8), "step": 0}
    cloudckpt.load(state, checkpoint_id=uri, **options)
    assert state["weights"].unique().tolist() == [state["step"]]
    return state["step"]


def test_a_checkpoint_is_replaced_and_nothing_of_the_old_one_stays(container, service):
    uri = f"{container}/run/step-1"
    cloudckpt.save(big(1), checkpoint_id=uri)
    old = names(service, container)
    cloudckpt.save(big(2), checkpoint_id=uri)
    new = names(service, container)
    assert loaded(uri) == 2
    assert set(old) & set(new) == {"run/step-1/.metadata"}
    assert len(new) == len(old)


def test_a_checkpoint_is_found_by_a_connection_string(container, azurite, monkeypatch):
    uri = f"{container}/run"
    cloudckpt.save(big(3), checkpoint_id=uri)
    for name in ("CLOUDCKPT_AZURE_ENDPOINT_URL", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    assert loaded(uri, config=Config(connections=3)) == 3


@pytest.mark.parametrize("there", [False, True])
def test_of_two_writers_the_second_to_commit_is_told(container, service, there, monkeypatch):
    uri = f"{container}/run"
    if there:
        cloudckpt.save(big(1), checkpoint_id=uri)
    writer = CloudStorageWriter(uri, config=Config())
    store = open_store(CheckpointURI.parse(uri), Config())
    put = store.put

    def overtaken(key, *arguments, **options):
        """Lets another writer commit just before this one does."""
        if key == "run/.metadata":
            monkeypatch.setattr(store, "put", put)
            cloudckpt.save(big(2), checkpoint_id=uri)
        return put(key, *arguments, **options)

    monkeypatch.setattr(store, "put", overtaken)
    with pytest.raises(CheckpointConflictError):
        cloudckpt.save(big(3), storage_writer=writer)
    assert loaded(uri) == 2
    assert len(names(service, container)) == 4  # those of the winner


def test_options_may_name_the_endpoint(container, azurite, monkeypatch):
    monkeypatch.delenv("CLOUDCKPT_AZURE_ENDPOINT_URL")
    config = Config(azure=AzureOptions(endpoint_url=azurite.url))
    cloudckpt.save(big(4), checkpoint_id=f"{container}/run", config=config)
    assert loaded(f"{container}/run", config=config) == 4


def test_stock_torch_takes_the_uri_once_installed(container):
    cloudckpt.install()
    try:
        state = {"x": torch.arange(1000)}
        dcp.save(state, checkpoint_id=f"{container}/run")
        found = {"x": torch.zeros(1000, dtype=torch.int64)}
        dcp.load(found, checkpoint_id=f"{container}/run")
    finally:
        cloudckpt.uninstall()
    assert torch.equal(found["x"], state["x"])


def _reshard(rank, world, uri, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(1024 * 1024, dtype=torch.float32).reshape(1024, 1024)
    cloudckpt.save({"x": distribute_tensor(full, mesh, [Shard(0)])}, checkpoint_id=uri)
    target = distribute_tensor(torch.zeros_like(full), mesh, [Shard(1)])
    cloudckpt.load({"x": target}, checkpoint_id=uri)
    assert torch.equal(target.to_local(), full.chunk(world, 1)[rank])
    dist.destroy_process_group()


def test_rows_of_two_ranks_are_loaded_as_columns(container, tmp_path):
    torch.multiprocessing.spawn(_reshard, (2, f"{container}/run", tmp_path), nprocs=2)
