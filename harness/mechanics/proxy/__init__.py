"""Faults of an endpoint that the job reaches by its address, such as an object store or a rendezvous: a Toxiproxy
server is put in front of it."""
