"""The settings that torchrun takes from the environment, on a node that a launcher made."""

from __future__ import annotations

from torchaos.harness.agent.wire import ENV_NODE, ENV_RUN_ID
from torchaos.harness.contracts import JobSpec

RENDEZVOUS_PORT = 29400


def elastic_env(index: int, spec: JobSpec, host: str, name: str, device: str | None = None) -> dict[str, str]:
    """The environment of torchrun on the node `index`. PET_* are torchrun's names for the defaults of its options. A
    setting of the user is kept; PET_RDZV_CONF gets `is_host` if it lacks it. `host`: the node that runs the rendezvous.
    `name`: this node. `device`: its network device; None: gloo and NCCL find the device from `name`."""
    is_host, conf = f"is_host={int(index == 0)}", spec.env.get("PET_RDZV_CONF", "")
    ours = {
        "PET_NNODES": str(spec.nodes),
        "PET_NODE_RANK": str(index),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{host}:{RENDEZVOUS_PORT}",
        "PET_RDZV_ID": f"{spec.env[ENV_RUN_ID]}-{spec.submission}",
        "PET_LOCAL_ADDR": name,
        **({"GLOO_SOCKET_IFNAME": device, "NCCL_SOCKET_IFNAME": device} if device else {}),
    }
    ours = {name: value for name, value in ours.items() if name not in spec.env}
    whole = conf if "is_host" in conf else ",".join(filter(None, (is_host, conf)))
    return {**ours, ENV_NODE: str(index), "PET_RDZV_CONF": whole}
