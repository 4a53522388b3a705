"""Checkpoints in an object store. During an exploration the job gets an S3 store of torchaos' own, whose objects are
files in a folder: the requests that change objects are recorded, and each state is put into the folder."""
