"""Terminals and commands beside workers have the rights of their job's owner, and are refused where nothing reaches
the workers."""

import asyncio
import base64

import pytest

from carpool.errors import InputError
from carpool.live.service.terminals import Terminals
from carpool.live.spec import parse
from tests.live.service.test_owners import as_root, open_home
from tests.support.services import one, output, serving, shell, started, until

__all__ = ["open_home"]
RIGHTS = "id -u; id -g; id -G; ulimit -d; pwd; umask; grep -E '^(Cap|NoNewPrivs|Cpus_allowed:)' /proc/self/status"


async def said_beside(service, job, *command, **size):
    printed = b""
    async for said in service.terminals.run(job, 0, {"command": list(command), **size}):
        printed += base64.b64decode(said.get("data", ""))
    return printed.decode().replace("\r\n", "\n"), said["exit_code"]


@as_root
async def test_a_terminal_and_a_command_have_exactly_the_rights_of_a_job(open_home):
    async with serving(open_home, gpus=3) as service:
        await service.requests.put_user("alice", {"uid": 7_000_101})
        limits = {"cpus": 1, "memory": 1 << 30}
        plain = await one(service, shell(RIGHTS, **limits), "alice")
        await service.queries.wait(plain)
        rights = output(service, plain)
        assert rights.startswith("7000101\n")

        script = f"{RIGHTS}; stat -c '%u %a' $(tty); echo ready; env; echo all of it; exec cat"
        job = await one(service, shell(script, terminal=True, **limits), "alice")
        await started(service, job)
        assert not service.state.jobs[job].job.can_pause
        await until(lambda: "all of it" in output(service, job))
        printed = output(service, job).replace("\r\n", "\n")
        assert printed.partition("ready\n")[0] == f"{rights}7000101 600\n"
        assert await said_beside(service, job, "sh", "-c", RIGHTS) == (rights, 0)
        seen = await said_beside(service, job, "sh", "-c", f"{RIGHTS}; stat -c '%u %a' $(tty)", rows=10, columns=20)
        assert seen == (f"{rights}7000101 600\n", 0)

        inside = set(printed.partition("ready\n")[2].removesuffix("all of it\n").split("\n"))
        beside, _ = await said_beside(service, job, "sh", "-c", "env")
        assert inside == set(beside.split("\n")), "also variables that are empty: they hide GPUs"
        assert "CUDA_VISIBLE_DEVICES=" in inside

        door = "cd $CARPOOL_WORKER_DIR; test -S door && ! test -w door && ! mv door x 2>/dev/null && echo closed"
        assert await said_beside(service, job, "sh", "-c", door) == ("closed\n", 0)
        await service.requests.cancel(job)
        await service.queries.wait(job)


async def test_a_false_door_is_not_believed(home):
    """A job that runs as the service's user can put anything in the place of its door."""
    async with serving(home, gpus=1) as service:
        job = await one(service, shell("sleep 60"))
        await started(service, job)
        assert await said_beside(service, job, "true") == ("", 0)
        door = service.home.rank(job, 1, 0) / "door"
        door.unlink()
        for answer, refusal in ((b"x" * 3_000_000, "cannot be read"), (b"[1]\n", "cannot be read"), (b"", "has ended")):

            async def answering(reader, writer, answer=answer):
                writer.write(answer)
                writer.close()

            async with await asyncio.start_unix_server(answering, door):
                with pytest.raises(InputError, match=refusal):
                    await said_beside(service, job, "true")
                with pytest.raises(InputError, match=refusal):
                    await service.terminals.type_to(job, 0, "1", {})
            door.unlink(missing_ok=True)
        await service.requests.cancel(job)
        await service.queries.wait(job)


def test_an_executor_without_doors_refuses_terminals():
    terminals = Terminals(None, None, object())
    with pytest.raises(InputError, match=r"terminal: the executor of this service offers no terminals"):
        terminals.check([parse({"command": ["bash"], "directory": "/", "terminal": True})])
    terminals.check([parse({"command": ["bash"], "directory": "/"})])
