"""One real service for the tests of the Python client."""

import pytest

import carpool
from tests.support.served import Served


@pytest.fixture(scope="package")
def served(tmp_path_factory):
    service = Served(tmp_path_factory.mktemp("client") / "home", "--gpus", "2").start()
    try:
        yield service
    finally:
        service.end()


@pytest.fixture(scope="package")
def connection(served):
    return carpool.connect(served.url, served.token)
