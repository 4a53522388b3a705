"""Makes the network namespaces of a run and keeps them alive.

    python namespace_holder.py FOLDER NODES own-user|same-user [LOCAL]

It starts one process for each node and one for the switch between them, each in its own network, mount and UTS
namespace. A namespace lives as long as a process is in it. So when these processes have ended, nothing is left to undo,
and nothing was changed in the host's namespaces. LOCAL is a path at which each node gets a folder of its own, in
memory. The first line of output is {"switch": pid, "nodes": [pid, ...]} or {"error": text}. The program is run by its
path and imports only the standard library, so that it starts at once."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

SUBNET = "10.77.0"
DEVICE = "eth0"
_NEWNS, _NEWUTS, _NEWUSER, _NEWNET = 0x20000, 0x4000000, 0x10000000, 0x40000000  # linux/sched.h
_NOSUID, _NODEV, _BIND, _REC, _SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000  # linux/mount.h
_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def address(node: int) -> str:
    return f"{SUBNET}.{11 + node}"


def port(node: int) -> str:
    """The name of the switch's end of a node's link."""
    return f"port{node}"


def name(node: int) -> str:
    """The name of a node. Torchelastic numbers nodes in the order of their names, as text."""
    return f"node{node:03d}"


def hosts(nodes: int) -> str:
    return "127.0.0.1 localhost\n" + "".join(f"{address(node)} {name(node)}\n" for node in range(nodes))


def main(folder: Path, nodes: int, own_user: bool, local: str = "") -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        if own_user:
            _become_root()
        pids = [_keep(lambda node=node: _node_files(folder / name(node), node, nodes, local)) for node in range(nodes)]
        wiring = ["link add switch type bridge stp_state 0 forward_delay 0", "link set switch addrgenmode none up"]
        for node, pid in enumerate(pids):
            wiring += [
                f"link add {port(node)} type veth peer name {DEVICE} netns {pid}",
                f"link set {port(node)} addrgenmode none master switch up",
            ]
        switch = _keep(lambda: _ip(wiring))
        for node, pid in enumerate(pids):
            up = [f"addr add {address(node)}/24 dev {DEVICE}", f"link set {DEVICE} addrgenmode none up"]
            _ip(up, pid)
        print(json.dumps({"switch": switch, "nodes": pids}), flush=True)
    except BrokenPipeError:  # the process that asked for the namespaces is gone
        os._exit(1)
    except (OSError, subprocess.SubprocessError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    while True:
        signal.pause()


def _keep(furnish: object) -> int:
    """Starts a child process in its own namespaces. `furnish`: a function that the child calls there. Returns the pid
    of the child when `furnish` has returned. Raises OSError if the kernel refuses, or if `furnish` fails."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _live_in_own(furnish, writer)
    os.close(writer)
    with os.fdopen(reader) as file:
        problem = file.read()
    if problem:
        raise OSError(problem)
    return pid


def _live_in_own(furnish: object, writer: int) -> NoReturn:
    try:
        _check(_libc.prctl(_PDEATHSIG, signal.SIGKILL), "PR_SET_PDEATHSIG")
        _check(_libc.unshare(_NEWNET | _NEWNS | _NEWUTS), "making namespaces")
        _check(_libc.mount(b"none", b"/", None, _REC | _SLAVE, None), "making mounts private")
        _ip(["link set lo up"])
        furnish()  # type: ignore[operator]
    except BaseException as error:
        os.write(writer, (str(error) or type(error).__name__).encode())
        os._exit(1)
    os.close(writer)
    os.close(1)  # so that the reader of the output does not wait for this process
    while True:
        signal.pause()


def _node_files(folder: Path, node: int, nodes: int, local: str) -> None:
    """Gives the node its own files with host names. Without them, torch's store would ask name servers that don't
    exist, and fail while it waits. If `local` is given, also mounts an empty folder of the node at that path."""
    folder.mkdir(parents=True, exist_ok=True)
    if local:
        os.makedirs(local, exist_ok=True)
        _check(_libc.mount(b"local", local.encode(), b"tmpfs", _NOSUID | _NODEV, b"mode=0700"), f"mounting {local}")
    switch = Path("/etc/nsswitch.conf").read_text() if os.path.exists("/etc/nsswitch.conf") else "hosts: files\n"
    texts = {
        "hosts": hosts(nodes),
        "nsswitch.conf": re.sub(r"(?m)^hosts:.*$", "hosts: files", switch),
        "resolv.conf": "",
    }
    for file, text in texts.items():
        (folder / file).write_text(text)
        target = os.path.realpath(f"/etc/{file}")
        if os.path.exists(target):
            _check(_libc.mount(bytes(folder / file), target.encode(), None, _BIND, None), f"mounting {file}")
    socket.sethostname(name(node))


def _become_root() -> None:
    """Becomes root of a new user namespace that contains only this user."""
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEWUSER), "making a user namespace")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _ip(commands: list[str], pid: int | None = None) -> None:
    inside = [] if pid is None else ["nsenter", f"--target={pid}", "--net"]
    text = "\n".join(commands) + "\n"
    done = subprocess.run([*inside, "ip", "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip: {(done.stderr.strip().splitlines() or ['failed'])[0]}")


def _check(result: int, action: str) -> None:
    if result != 0:
        raise OSError(f"{action}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "own-user", *sys.argv[4:])
