"""What was saved, loaded and damaged: which checkpoint is which of the twin's, and where a job resumed. Pure."""
