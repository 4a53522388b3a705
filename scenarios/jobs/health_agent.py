"""A health agent: it watches the GPUs of this node beside a training job. When a GPU is about to fail, it tells the job
to save a checkpoint and end:

    CUDA_VISIBLE_DEVICES=0,1 health_agent.py torchrun --nproc-per-node 2 --max-restarts 0 gpt_ddp.py ...

It tells the job by SIGTERM to the ranks on that GPU, as a spot machine does. A job that gets the signal in time loses
no step: it saves, and ends with an error. Then this agent starts the job again, with a spare GPU of this node in the
place of each sick one. If there is no spare GPU, or if CUDA_VISIBLE_DEVICES does not name the GPUs by number, it ends,
and the scheduler has to start the job. Without `--max-restarts 0`, torchrun would restart the ranks on the sick GPU.
Needs nvidia-ml-py. Copy it. To run it as a service of the node, change only how it finds the ranks.

It asks NVML. Options, before the command:

    --kernel-log  also reads the kernel's log, which has each Xid, even if nobody waited for the event
    --dcgm        also asks the node's DCGM, by dcgmi
    --predict     if a GPU corrects more and more errors (worse ones often follow): SIGUSR1 to its ranks, so that the
                  job saves and goes on
    --drain       on one of several nodes: torchrun gets SIGTERM, too, if a GPU that is used is sick and none is
                  spare. The node leaves the job to the others and to a standby. A standby with a sick GPU leaves
                  before it gets ranks
    --strikes=N   the node leaves when ranks were killed on it N times, though nothing says that it is sick
    --self-test   the node first computes something whose answer is known (self_test.py), and does not join the job if
                  the answer is wrong. It leaves when a rank finds a wrong answer (gpt_ddp.py --self-test)"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# The XIDs for which NVIDIA's guide says to reset, restart or replace a GPU. Other XIDs are faults of the program, or
# need no action.
FATAL_XIDS = {48, 64, 74, 79, 95, 119, 120, 140, 143, 144, 145, 146, 147, 148, 149, 150}
RECOVERY_ACTION = 230  # field: none, reset, reboot, ...
EVERY_S = 1.0
SELF_TEST, WRONG = Path(__file__).with_name("self_test.py"), 86  # its exit code if the node computes wrongly
SLOWDOWNS = 0x20 | 0x40 | 0x80  # slowed by the driver for heat, by the GPU for heat, by the power supply
MANY_CORRECTED = 10_000
RISING = 1_000  # corrected errors from one look to the next
AGAIN_S = 60.0  # a GPU that goes on like this makes no job save more often
LOGGED = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)\): (\d+)")  # of the driver
DCGM_XID = "230"  # field: the last Xid
ENDED = re.compile(rb"failed \(exitcode: (-?\d+)\)")  # torchrun's line about the first rank of this node that failed
# Signals by which a machine ends a rank. A rank whose peer is gone ends by an exception, or aborts.
KILLED = {-signal.SIGILL, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGKILL, -signal.SIGSEGV}


def main(command: list[str]) -> int:
    more: list[str] = []
    while command[0].startswith("--"):
        more.append(command.pop(0))
    beside = Path(sys.executable).parent / command[0]  # torchrun, where this environment is not on the PATH
    program = command[0] if shutil.which(command[0]) or not beside.exists() else str(beside)
    if "--self-test" in more and subprocess.call([sys.executable, SELF_TEST]):
        print("health agent: this node does not join the job", flush=True)
        return 1
    watcher, listen = _start_watcher(more)
    job = Job([program, *command[1:]], listen, more)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, job.pass_on)
    try:
        return job.run()
    finally:
        watcher.kill()
        watcher.wait()


def _start_watcher(more: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The process that watches the GPUs, and the pipe from which its words are read."""
    # torchaos's overlay must reach only the processes that watch, never the ranks: NCCL reads its topology from NVML.
    overlay, others = os.environ.get("TORCHAOS_NVML_PATH"), os.environ.get("LD_LIBRARY_PATH")
    paths = ":".join(path for path in (overlay, others) if path)
    env = {**os.environ, **({"LD_LIBRARY_PATH": paths} if paths else {})}
    listen, tell = os.pipe()
    arguments = ["--watch", str(os.getpid()), str(tell), *more]
    watcher = subprocess.Popen([sys.executable, __file__, *arguments], env=env, pass_fds=[tell])
    os.close(tell)
    os.set_blocking(listen, False)
    return watcher, listen


class Job:
    """The job of this node. `listen`: the pipe of the watcher."""

    def __init__(self, command: list[str], listen: int, more: list[str]) -> None:
        self.command, self.listen, self.more = command, listen, more
        self.strikes = next((int(word.partition("=")[2]) for word in more if word.startswith("--strikes=")), 0)
        self.gpus, self.told = os.environ.get("CUDA_VISIBLE_DEVICES", ""), b""
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False  # this process got a signal

    def run(self) -> int:
        """Runs the job, again with a spare GPU in the place of each sick one. Returns its exit code."""
        while True:
            code = self._once()
            others = without_sick(self.gpus, self.told.decode())
            if code == 0 or self.stopped or others == self.gpus:
                return code if code >= 0 else 128 - code
            print(f"health agent: starting again on GPUs {others} instead of {self.gpus}", flush=True)
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus = others

    def _once(self) -> int:
        listens = self.strikes or "--self-test" in self.more
        job = self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE if listens else None)
        if job.stderr is not None:
            threading.Thread(target=strikes, args=(job.stderr, self.strikes, self.leave), daemon=True).start()
        while (code := job.poll()) is None:
            self.told += _read(self.listen)
            if "--drain" in self.more and leaves(self.gpus, self.told.decode()) and not self.stopped:
                self.leave()
            time.sleep(EVERY_S / 10)
        self.told += _read(self.listen)
        return code

    def leave(self) -> None:
        print("health agent: this node leaves the job", flush=True)
        self.pass_on(signal.SIGTERM, None)

    def pass_on(self, signum: int, frame: object) -> None:
        self.stopped = True
        if self.process is not None:
            self.process.send_signal(signum)


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return b""


def strikes(lines: Iterable[bytes], most: int, leave: Callable[[], None]) -> None:
    """Pass on torchrun's lines. Leave when they tell that a rank of this node found it to compute wrongly, or for the
    `most`th time that one was killed."""
    killed = 0
    for line in lines:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        code = int(found[1]) if (found := ENDED.search(line)) else 0
        killed += code in KILLED
        if code == WRONG:
            print("health agent: a rank found that this node computes wrongly", flush=True)
        elif code in KILLED and killed == most:
            print(f"health agent: ranks were killed here {killed} times", flush=True)
        else:
            continue
        time.sleep(EVERY_S)  # a signal gets lost in torchrun while it logs: logging catches the exception
        leave()


def leaves(gpus: str, told: str) -> bool:
    """Whether this node can't go on: a GPU is sick, and no spare one takes its place. The arguments are those of
    without_sick()."""
    sick = {number for line in told.splitlines() if line.startswith("sick") for number in line.split()[1:]}
    used = {gpu.strip() for gpu in gpus.split(",")} - {""}
    return bool(sick & used if used else sick) and without_sick(gpus, told) == gpus


def without_sick(gpus: str, told: str) -> str:
    """The GPUs with which the job is started again: those of `gpus`, with a spare one for each sick one. `gpus` itself
    if none is sick, or if too few are spare. `told`: what the watcher wrote, `has 0 1 2` and `sick 1`."""
    lines = [line.split() for line in told.splitlines()]
    every = {number for word, *numbers in lines if word == "has" for number in numbers}
    sick = {number for word, *numbers in lines if word == "sick" for number in numbers}
    used = [gpu.strip() for gpu in gpus.split(",")]
    spare = sorted(every - sick - set(used), key=int, reverse=True)
    if not set(used) <= every or len(spare) < len(sick & set(used)):
        return gpus
    return ",".join(spare.pop() if gpu in sick else gpu for gpu in used)


def watch(job: int, tell: int, *more: str) -> None:
    """Watch until this process is killed. Sends the ranks of a GPU one message each time that the GPU turns bad. `job`:
    the process below which the ranks are. `tell`: the file descriptor for without_sick(). `more`: --kernel-log, --dcgm.
    Raises OSError if the kernel's log can't be read."""
    import pynvml as nvml

    nvml.nvmlInit()
    gpus = Gpus(nvml, job, tell, more)
    print(f"health agent: {gpus.count} GPUs are watched", flush=True)
    os.write(tell, f"has {' '.join(map(str, range(gpus.count)))}\n".encode())
    while True:
        gpus.look()


class Gpus:
    """The GPUs of this node. `bad`: those whose ranks were told to leave."""

    def __init__(self, nvml: Any, job: int, tell: int, more: Sequence[str]) -> None:
        self.nvml, self.job, self.tell, self.more = nvml, job, tell, more
        self.count, self.bad = nvml.nvmlDeviceGetCount(), set[int]()
        handles = [nvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(self.count)]
        self.uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        self.places = [_place(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
        self.log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK) if "--kernel-log" in more else None
        if self.log is not None:
            os.lseek(self.log, 0, os.SEEK_END)
        self.events = nvml.nvmlEventSetCreate()
        for handle in handles:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self.events)
        self.looked, self.noted = 0.0, dict[int, list[str]]()
        self.corrected, self.saved_s = dict[int, int](), dict[int, float]()

    def look(self) -> None:
        """Waits for an event, at most EVERY_S seconds, and tells the ranks of each GPU that has turned bad to leave."""
        reasons = self._reported()
        if reasons or time.monotonic() - self.looked > EVERY_S / 2:
            self.looked = time.monotonic()
            states = {gpu: _problem(self.nvml, gpu) for gpu in range(self.count)}
            states |= _seen_by_dcgm() if "--dcgm" in self.more else {}
            sick = {gpu: why for gpu, why in states.items() if why}
            reasons = {**sick, **reasons, **self._in_kernels_log()}
            self._note()
            if "--predict" in self.more:
                self._predict()
            self.bad.intersection_update(sick)  # a GPU that is well again may turn bad again
        for gpu, why in reasons.items():
            if gpu not in self.bad:
                self._turns_bad(gpu, why)

    def _reported(self) -> dict[int, str]:
        nvml = self.nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self.events, int(EVERY_S * 1000))
            if event.eventData in FATAL_XIDS:
                return dict.fromkeys(_index(nvml, event, self.count), f"Xid {event.eventData}")
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                time.sleep(0.05)  # a bad GPU reports this at once, for as long as it is bad
            elif error.value != nvml.NVML_ERROR_TIMEOUT:
                raise
        return {}

    def _in_kernels_log(self) -> dict[int, str]:
        return {
            self.places.index(place): f"the kernel's log shows Xid {number}"
            for place, number in (_logged(self.log) if self.log is not None else ())
            if number in FATAL_XIDS and place in self.places
        }

    def _note(self) -> None:
        for gpu in range(self.count):
            if (notes := _notes(self.nvml, gpu)) != self.noted.get(gpu, []):
                self.noted[gpu] = notes
                print(f"health agent: GPU {gpu}: {', '.join(notes) or 'nothing to note any more'}", flush=True)

    def _predict(self) -> None:
        before, self.corrected = self.corrected, _corrected(self.nvml, self.count)
        for gpu in rising(before, self.corrected):
            if self.looked - self.saved_s.get(gpu, -AGAIN_S) >= AGAIN_S:
                self.saved_s[gpu] = self.looked
                print(f"health agent: GPU {gpu}: {self.corrected[gpu]} errors were corrected; time to save", flush=True)
                for pid in ranks_on(gpu, self.uuids[gpu], self.job):
                    if _catches(pid, signal.SIGUSR1):  # a rank that has only just started would die of it
                        os.kill(pid, signal.SIGUSR1)

    def _turns_bad(self, gpu: int, why: str) -> None:
        self.bad.add(gpu)
        os.write(self.tell, f"sick {gpu}\n".encode())
        pids = ranks_on(gpu, self.uuids[gpu], self.job)
        print(f"health agent: GPU {gpu}: {why}; telling {len(pids)} ranks to leave", flush=True)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)


def _index(nvml: Any, event: Any, count: int) -> list[int]:
    """The index of the GPU that an event is about; the indices of all GPUs if the event can't be read any more."""
    try:
        return [int(nvml.nvmlDeviceGetIndex(event.device))]
    except nvml.NVMLError:
        return [gpu for gpu in range(count) if _problem(nvml, gpu)] or list(range(count))


def _place(bus: str | bytes) -> tuple[int, ...]:
    """Domain, bus and device of a PCI address."""
    text = bus.decode() if isinstance(bus, bytes) else bus
    return tuple(int(part, 16) for part in text.partition(".")[0].split(":"))


def _logged(log: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields the PCI address and the number of each Xid that the kernel has logged since the last call."""
    while True:
        try:
            record = os.read(log, 1 << 14)
        except BrokenPipeError:  # the kernel has overwritten this record
            continue
        except BlockingIOError:
            return
        if found := LOGGED.search(record.decode(errors="replace")):
            yield tuple(int(part, 16) for part in found.groups()[:3]), int(found[4])


def _seen_by_dcgm() -> dict[int, str | None]:
    """The GPUs for which the node's DCGM shows a fatal Xid. A row of `dcgmi dmon` is `GPU 0  79`."""
    rows = subprocess.run(["dcgmi", "dmon", "-e", DCGM_XID, "-c", "1"], capture_output=True, text=True, check=False)
    found = (line.split() for line in rows.stdout.splitlines())
    return {
        int(words[1]): f"DCGM shows Xid {words[2]}"
        for words in found
        if words[:1] == ["GPU"] and len(words) == 3 and words[2].isdigit() and int(words[2]) in FATAL_XIDS
    }


def _problem(nvml: Any, gpu: int) -> str | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
        (action,) = nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION])
        if action.nvmlReturn == nvml.NVML_SUCCESS and action.value.uiVal:
            return f"its recovery action is {action.value.uiVal}"
    except nvml.NVMLError as error:
        return f"NVML says: {error}"
    try:
        _corrected, _uncorrected, _pending, failure = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError:
        return None  # not every GPU has them
    return "a row could not be remapped" if failure else None


def _corrected(nvml: Any, count: int) -> dict[int, int]:
    """How many errors of each GPU were corrected since the driver was loaded, where it says so."""
    found = {}
    for gpu in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
            found[gpu] = int(nvml.nvmlDeviceGetTotalEccErrors(handle, 0, nvml.NVML_VOLATILE_ECC))
        except nvml.NVMLError:
            continue
    return found


def rising(before: dict[int, int], now: dict[int, int]) -> list[int]:
    """The GPUs that corrected many errors since the last look. There is none at the first look."""
    return [gpu for gpu, count in now.items() if count - before.get(gpu, count) > RISING]


def _notes(nvml: Any, gpu: int) -> list[str]:
    """Conditions that are worth a line in the log, but no reason to stop a job."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        celsius = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        corrected = nvml.nvmlDeviceGetTotalEccErrors(handle, 0, nvml.NVML_VOLATILE_ECC)
    except nvml.NVMLError:
        return []
    slow = [f"it is slowed down (reasons {reasons:#x}, {celsius} degrees)"] if reasons & SLOWDOWNS else []
    return slow + ([f"{corrected} errors were corrected"] if corrected > MANY_CORRECTED else [])


def ranks_on(gpu: int, uuid: str, job: int) -> list[int]:
    """The rank processes below the job that use this GPU."""
    children, found = _children(), []
    waiting = children.get(job, [])
    while waiting:
        pid = waiting.pop()
        env = _environ(pid)
        if "RANK" not in env or "LOCAL_RANK" not in env:
            waiting += children.get(pid, [])  # a rank itself is responsible for those that it starts
        elif _uses(env, gpu, uuid):
            found.append(pid)
    return found


def _children() -> dict[int, list[int]]:
    """The processes of this machine, by their parent."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    return children


def _uses(env: dict[str, str], gpu: int, uuid: str) -> bool:
    """Local rank N uses GPU N, or the Nth GPU that is visible to it, or the only one."""
    listed, local = env.get("CUDA_VISIBLE_DEVICES", "").strip(), int(env["LOCAL_RANK"])
    visible = [] if listed in ("", "-1") else [part.strip() for part in listed.split(",")]
    mine = visible[local] if local < len(visible) else visible[0] if len(visible) == 1 else str(local)
    return mine == str(gpu) or (mine.startswith("GPU-") and uuid.startswith(mine))


def _catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signum - 1) & 1)


def _environ(pid: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (word.decode(errors="replace").partition("=") for word in words)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    elif sys.argv[1:]:
        sys.exit(main(sys.argv[1:]))
    else:
        sys.exit(__doc__)
