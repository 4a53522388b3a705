"""A stand-in for the harness, for tests that kill it: RUN_DIR RUN_ID VICTIM_PID POINT. It guards the job's processes, a
control page, a file and a process, damages the last three, and then undoes. At POINT it reports this and waits to be
killed; with `never` it continues to the end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.rollback.file_handles import File
from torchaos.harness.rollback.handles import JobProcesses, PageSlot, Process
from torchaos.harness.rollback.reaper_client import ReaperClient

run_dir, run_id, victim, stop_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]


def point(name: str) -> None:
    if name == stop_at:
        print(name, flush=True)
        signal.pause()


reaper = ReaperClient.start(run_dir, run_id)
print(json.dumps({"reaper": reaper.pid}), flush=True)
point("before guard")
reaper.record_undo("job", [JobProcesses(run_id)], owner="job")
subprocess.Popen(["sleep", "600"], env={ENV_RUN_ID: run_id}, start_new_session=True)
file, page = run_dir / "job" / "data", run_dir / "fault.page"
copy = File.of(file, file.parent, run_dir / "undo")
reaper.record_undo("fault", [PageSlot(str(page)), copy, Process.of(victim, "resume")], owner="fault", limit_s=60.0)
point("after guard")
reaper.mark("fault", "maybe_applied")
ControlPage(page, create=True).write(ControlPage.ALLOWED, 1)
file.write_text("damaged")
os.kill(victim, signal.SIGSTOP)
reaper.mark("fault", "applied")
point("after apply")
reaper.undo("fault")
point("after undo")
reaper.close()
