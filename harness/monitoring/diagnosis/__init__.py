"""Finds the ranks that caused a hang. Input: Flight Recorder dumps, the stamps of torchaos's agent, or a live job.
Output: a `Diagnosis` with culprits, suspects and evidence. No rank is named if a healthy job could look the same."""
