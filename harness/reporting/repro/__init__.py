"""Makes a script that shows a finding without torchaos: it runs the job with plain torchrun, and uses kill. `case`
reads the record and decides whether a script can show the finding; `write` joins the parts in `script/`."""
