"""`python -m torchaos.harness` is the same as the command `torchaos`."""

from torchaos.harness.cli import main

main()
