"""Toxiproxy before an endpoint that the job reaches by its address: a rendezvous store, an object store, anything."""
