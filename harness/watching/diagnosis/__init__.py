"""Who is to blame for a hang: from Flight Recorder dumps, from the agent's stamps, from a live job."""
