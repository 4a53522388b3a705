"""Faults of an endpoint, such as an object store or a rendezvous, that the job reaches by its address. A Toxiproxy
server is put in front of it."""
