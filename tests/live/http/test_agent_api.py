"""The routes of agents on a real service: requests that schemathesis generates, with the token of an agent."""

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from carpool.live.executors import wire
from carpool.live.executors.wire import DeviceRow, DoorsHere, NodeState
from tests.live.http.test_api import CHECKS
from tests.support.served import Served

INSTANCE = "0123456789abcdef"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("cluster") / "home", "--executor", "agents").start()
    try:
        yield served
    finally:
        served.end()


def as_agent(served, path, message, token):
    headers = {"Authorization": f"Bearer {token}"}
    return requests.post(f"{served.url}{path}", json=wire.plain(message), headers=headers, timeout=20)


def test_a_name_that_is_twice_in_an_exchange_is_refused(cluster):
    headers = {"Authorization": f"Bearer {cluster.client().post('/v1/nodes', {'name': 'twice'})['token']}"}
    for body in (b'{"node":"twice","node":"other"}', b'{"devices":[{"index":0,"index":1}]}'):
        answer = requests.post(f"{cluster.url}/v1/agents/sync", data=body, headers=headers, timeout=20)
        assert (answer.status_code, "twice in one object" in answer.json()["error"]) == (422, True), answer.text


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_no_request_of_an_agent_breaks_it(cluster, mode):
    """The agent has joined, and half of its requests name its own process, so that they come far."""
    node = f"n{mode.name.lower()}"
    token = cluster.client().post("/v1/nodes", {"name": node})["token"]
    devices = (DeviceRow(0),)
    here = NodeState(node, node, "boot", INSTANCE, 1, "127.0.0.1", 1 << 30, "time-slicing", "0", devices, parts={})
    assert as_agent(cluster, "/v1/agents/sync", here, token).status_code == 200
    assert as_agent(cluster, "/v1/agents/doors", DoorsHere(INSTANCE), token).status_code == 200
    schema = schemathesis.openapi.from_dict(cluster.client().get("/openapi.json"))
    asked = 0

    def examine(case):
        nonlocal asked
        asked += 1
        if asked % 2 and mode is GenerationMode.POSITIVE:
            if case.operation.path == "/v1/agents/doors" and isinstance(case.body, dict):
                case.body["instance"] = INSTANCE
            elif "instance" in (case.query or {}):
                case.query["instance"] = INSTANCE
        headers = {"Authorization": f"Bearer {token}"}
        case.validate_response(case.call(base_url=cluster.url, headers=headers, session=session), checks=CHECKS)

    some = settings(
        max_examples=40, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path.startswith("/v1/agents/"):
                some(given(operation.as_strategy(generation_mode=mode))(examine))()
    assert asked > 100
    assert "Traceback" not in cluster.log.read_text()
