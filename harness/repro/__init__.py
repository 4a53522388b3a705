"""A finding shown without torchaos: a script that runs the job with plain torchrun, and uses kill.

`script/` holds the parts that the script is made of; case.py fills in what was found, write.py puts it together.
"""
