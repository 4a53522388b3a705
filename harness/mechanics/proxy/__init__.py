"""Faults of one endpoint that the job reaches by its address: a Toxiproxy server stands before a store, a rendezvous,
anything."""
