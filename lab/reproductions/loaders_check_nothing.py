"""torch.load and safetensors compare no bytes with a check sum: a flipped bit is loaded as a value.

    python loaders_check_nothing.py

Observed: both files are loaded without a message, with a 1.0078125 among the ones. A file of torch.save has a CRC of
each tensor, which torch.load does not check. Versions: Python 3.11.7, torch 2.13.0+cpu, safetensors 0.8.0.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

whole = {"w": torch.ones(1000)}
torch.save(whole, "w.pt")
save_file(whole, "w.safetensors")
for name, load in (("w.pt", torch.load), ("w.safetensors", load_file)):
    data = bytearray(Path(name).read_bytes())
    data[data.index(b"\x00\x00\x80\x3f" * 9) + 2] ^= 1  # a bit of a number
    Path(name).write_bytes(data)
    print(name, load(name)["w"].unique().tolist())
