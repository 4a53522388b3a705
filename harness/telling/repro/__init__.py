"""A finding shown without torchaos: a script that runs the job with plain torchrun, and uses kill.

`case` reads the record and says whether that can be done, and with what; `write` puts the script together, out of its
own parts in `script/`."""
