"""Real clusters on this machine, one of each kind for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusters import kubernetes as kubernetes_cluster
from clusters import slurm as slurm_cluster
from clusters import ssh as ssh_servers
from clusters.kubernetes import Kubernetes
from clusters.slurm import Slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    if lacks := slurm_cluster.missing():
        pytest.skip(lacks)
    try:
        with slurm_cluster.cluster() as one:
            yield one
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kubernetes() -> Iterator[Kubernetes]:
    if lacks := kubernetes_cluster.missing():
        pytest.skip(lacks)
    with kubernetes_cluster.cluster() as one:
        yield one


@pytest.fixture(scope="session")
def ssh(slurm: Slurm) -> Iterator[Slurm]:
    if lacks := ssh_servers.missing():
        pytest.skip(lacks)
    with ssh_servers.served(slurm) as one:
        yield one
