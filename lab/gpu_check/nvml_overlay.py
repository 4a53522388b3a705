"""Checks the NVML overlay above a real driver, in nvidia-ml-py and nvidia-smi: ordered values replace the driver's, all
other values are the driver's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from row import not_possible, overlaid

ASK = """
import json, pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
def ask(call, *arguments):
    try:
        found = call(*arguments)
        return str([getattr(found, field[0]) for field in found._fields_] if hasattr(found, "_fields_") else found)
    except n.NVMLError as error:
        return f"error {error.value}"
stable = [n.nvmlDeviceGetName, n.nvmlDeviceGetUUID, n.nvmlDeviceGetPciInfo, n.nvmlDeviceGetSerial, n.nvmlDeviceGetVbiosVersion,
    n.nvmlDeviceGetEccMode, n.nvmlDeviceGetRemappedRows, n.nvmlDeviceGetRowRemapperHistogram, n.nvmlDeviceGetMigMode,
    n.nvmlDeviceGetCudaComputeCapability, n.nvmlDeviceGetMaxPcieLinkGeneration, n.nvmlDeviceGetSupportedEventTypes,
    n.nvmlDeviceGetPowerManagementLimitConstraints, n.nvmlDeviceGetNumGpuCores, n.nvmlDeviceGetArchitecture]
answer = {call.__name__: ask(call, gpu) for call in stable}
answer["links"] = [ask(n.nvmlDeviceGetNvLinkState, gpu, link) for link in range(18)]
ordered = {"ecc": ask(n.nvmlDeviceGetTotalEccErrors, gpu, 1, 0), "temperature": ask(n.nvmlDeviceGetTemperature, gpu, 0),
    "action": [(f.nvmlReturn, f.value.uiVal) for f in n.nvmlDeviceGetFieldValues(gpu, [230])]}
print(json.dumps([answer, ordered]))
"""


def asked(env: dict[str, str]) -> list[dict[str, str]]:
    import json

    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except Exception as error:
        not_possible(f"no driver answers ({error})")
    with tempfile.TemporaryDirectory() as folder:
        plain = dict(os.environ)
        env = overlaid(Path(folder))
        bare, through = asked(plain), asked(env)
        if bare[0] != through[0]:
            print(bare[0], through[0], "the overlay changed what nothing was ordered of", sep="\n")
            return 1
        orders = "gpu0.ecc.volatile.uncorrected = 77\ngpu0.temperature = 123\ngpu0.recovery_action = 1\n"
        Path(folder, "orders.nvml").write_text(orders)
        ordered = asked(env)
        if ordered[0] != bare[0] or ordered[1] != {"ecc": "77", "temperature": "123", "action": [[0, 1]]}:
            print(ordered, "what was ordered is not what was read", sep="\n")
            return 1
        smi = shutil.which("nvidia-smi")
        told = "there is no nvidia-smi"
        if smi:
            query = [
                smi,
                "--query-gpu=temperature.gpu,ecc.errors.uncorrected.volatile.total",
                "--format=csv,noheader",
                "-i",
                "0",
            ]
            shown = subprocess.run(query, env=env, capture_output=True, text=True, check=False).stdout.strip()
            told = f"nvidia-smi shows {shown}, where 123 degrees and 77 errors are ordered"
    print(f"driver {driver}: {len(bare[0])} answers pass unchanged, 3 orders are read; {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
